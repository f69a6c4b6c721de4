"""Causal language modelling on packed documents, in which no token attends to another document.

Each document in a sample has its own positions, in the form that models of the transformers library accept. The first
token of a document is not predicted, since only the previous document comes before it.
"""

from bench.core.network import IGNORED, PAD, TokenKind

KINDS = (TokenKind("tokens", 1024, {"input_ids": PAD, "labels": IGNORED}, positions="position_ids"),)
REDUCTION = "mean"
