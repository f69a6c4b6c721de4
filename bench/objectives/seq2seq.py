"""Sequence to sequence: each sample has two texts. The encoder reads one text, and the decoder predicts the other."""

from bench.core.network import IGNORED, PAD, TokenKind

KINDS = (
    TokenKind("encoder", 512, {"input_ids": PAD}, mask="attention_mask", text=None),
    TokenKind("decoder", 128, {"labels": IGNORED}, text=None),
)
REDUCTION = "mean"
