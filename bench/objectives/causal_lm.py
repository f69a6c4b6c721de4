"""Causal language modelling: the model predicts every token of a text from the previous tokens. Inputs and labels are
the same tokens, because models of transformers shift the labels by one position. In samples of data=instructions, only
answers have labels."""

from bench.core.network import IGNORED, PAD, TokenKind

# No mask is needed: padding comes last, and tokens do not attend to later tokens.
KINDS = (TokenKind("tokens", 1024, {"input_ids": PAD, "labels": IGNORED}),)
REDUCTION = "mean"
