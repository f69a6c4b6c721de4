"""Causal language modelling in which no token attends to another document. Documents packed into one sample have their
own positions, as models of transformers take them, and no token is predicted from the previous document."""

from bench.core.network import IGNORED, PAD, TokenKind

KINDS = (TokenKind("tokens", 1024, {"input_ids": PAD, "labels": IGNORED}, positions="position_ids"),)
REDUCTION = "mean"
