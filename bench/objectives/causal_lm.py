"""Causal language modelling: predict every token of a text from the tokens before it. Inputs and labels are the same
tokens; the model shifts the labels by one, as models of transformers do."""

from bench.core.network import IGNORED, PAD, TokenKind

# no mask: padding comes last, and no real token attends to later tokens
KINDS = (TokenKind("tokens", 1024, {"input_ids": PAD, "labels": IGNORED}),)
REDUCTION = "mean"
