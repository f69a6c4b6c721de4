"""The kinds of tokens that a sample holds: what objectives define, and data, models and records speak of by name."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

PAD = 0
"""Id that fills a row of input which is shorter than its length, in every family."""
IGNORED = -100
"""Label at which there is no loss: transformers' and torch's own."""


class TokenKind(NamedTuple):
    """Tokens of one kind in each sample of an objective."""

    name: str  # in `sequence`, in the tokens of a record and in the columns of its steps
    length: int  # tokens per sample by default, padding included
    arguments: Mapping[str, int]  # the model's keyword arguments that hold them, with what fills a shorter row of each
    mask: str | None = None  # keyword argument that is 1 at a token and 0 at padding, given where rows may be shorter
    # of a keyword argument, the share of each row, from its beginning, that it does not show: it holds what fills there
    hidden: Mapping[str, float] = {}
    # what of a piece of text it holds: all of it, what is left where spans are hidden, the spans; None: no such thing
    text: Literal["whole", "kept", "hidden"] | None = "whole"
    # keyword argument that counts a token's place in its document: given, no token sees another document's
    positions: str | None = None
