"""Span corruption (arXiv 1910.10683, section 3.1.4): the encoder reads a text with spans hidden, the decoder writes the
spans. What T5, mT5 and ByT5 were pre-trained with."""

from bench.core.network import IGNORED, PAD, TokenKind
from bench.core.spec import LENGTHS

KINDS = (
    TokenKind("encoder", LENGTHS["encoder"], {"input_ids": PAD}, mask="attention_mask", text="kept"),
    # no mask: the decoder's padding comes last, where its real tokens do not look
    TokenKind("decoder", LENGTHS["decoder"], {"labels": IGNORED}, text="hidden"),
)
REDUCTION = "mean"
