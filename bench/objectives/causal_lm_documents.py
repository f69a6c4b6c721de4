"""Causal language modelling in which no token sees another document: the documents that are packed into one sample have
positions of their own, as transformers' models take them, and no token is predicted from the document before it."""

from bench.core.network import IGNORED, PAD, TokenKind

KINDS = (TokenKind("tokens", 1024, {"input_ids": PAD, "labels": IGNORED}, positions="position_ids"),)
REDUCTION = "mean"
