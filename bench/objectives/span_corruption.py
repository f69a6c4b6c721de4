"""Span corruption, the pre-training objective of T5, mT5 and ByT5 (arXiv 1910.10683, section 3.1.4). The encoder reads
a text with hidden spans, and the decoder predicts the hidden spans."""

from bench.core.network import IGNORED, PAD, TokenKind
from bench.core.spec import LENGTHS

KINDS = (
    TokenKind("encoder", LENGTHS["encoder"], {"input_ids": PAD}, mask="attention_mask", text="kept"),
    # The decoder needs no mask: its padding comes last, and tokens do not attend to later tokens.
    TokenKind("decoder", LENGTHS["decoder"], {"labels": IGNORED}, text="hidden"),
)
REDUCTION = "mean"
