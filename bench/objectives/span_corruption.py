"""Span corruption (arXiv 1910.10683, section 3.1.4), the pre-training of T5, mT5 and ByT5: the encoder reads a text
with hidden spans, the decoder writes the spans."""

from bench.core.network import IGNORED, PAD, TokenKind
from bench.core.spec import LENGTHS

KINDS = (
    TokenKind("encoder", LENGTHS["encoder"], {"input_ids": PAD}, mask="attention_mask", text="kept"),
    # no mask: the decoder's padding comes last, and no real token attends to later tokens
    TokenKind("decoder", LENGTHS["decoder"], {"labels": IGNORED}, text="hidden"),
)
REDUCTION = "mean"
