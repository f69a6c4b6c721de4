"""Sequence to sequence: the encoder reads one text, and the decoder predicts another text of the same sample."""

from bench.core.network import IGNORED, PAD, TokenKind

KINDS = (
    TokenKind("encoder", 512, {"input_ids": PAD}, mask="attention_mask", text=None),
    TokenKind("decoder", 128, {"labels": IGNORED}, text=None),
)
REDUCTION = "mean"
