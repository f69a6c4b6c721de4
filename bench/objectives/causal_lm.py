"""Causal language modelling: every token of a text is predicted from those before it. Inputs and labels are the same
tokens, and the model shifts the labels by one, as transformers' models do."""

from bench.core.network import IGNORED, PAD, TokenKind

# no mask: padding comes last, where real tokens do not look
KINDS = (TokenKind("tokens", 1024, {"input_ids": PAD, "labels": IGNORED}),)
REDUCTION = "mean"
