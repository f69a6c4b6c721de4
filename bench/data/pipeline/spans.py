"""Span corruption, the objective that T5, mT5 and ByT5 were pre-trained with; and endless samples made of the pieces of
a corpus: every epoch takes all pieces, in an order of its own.

Raffel et al., JMLR 21 (2020), section 3.1.4; the arithmetic is that of `random_spans_helper` and
`random_spans_noise_mask` in google-research/text-to-text-transfer-transformer, t5/data/preprocessors.py.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Tokens = NDArray[np.int32]
    Mask = NDArray[np.bool_]


class SpanCorruption(NamedTuple):
    """How much of a text is hidden, and in spans of which mean length."""

    density: float  # of the raw tokens, above 0 and below 1
    mean_length: float  # tokens, at least 1

    def counts(self, length: int) -> tuple[int, int]:
        """Return (hidden tokens, spans) for `length` ≥ 2 raw tokens: fixed numbers, only the places are random.

        At least one token is hidden and one kept. T5's own function fails where there are fewer kept tokens than
        spans; here the spans become fewer.
        """
        hidden = min(max(round(length * self.density), 1), length - 1)
        spans = max(round(hidden / self.mean_length), 1)
        return hidden, min(spans, hidden, length - hidden)

    def lengths(self, length: int) -> tuple[int, int]:
        """Return (encoder, decoder) tokens made of `length` raw ones: a sentinel per span and one EOS in each."""
        hidden, spans = self.counts(length)
        return length - hidden + spans + 1, hidden + spans + 1

    def raw_length(self, encoder: int, decoder: int) -> int:
        """Return the most raw tokens that fit both lengths; 0 where not even the shortest text (2 tokens) does.

        The encoder's side is then full unless the decoder's is the limit; what is left over is padding.
        """

        def too_long(length: int) -> bool:
            inputs, targets = self.lengths(length)
            return inputs > encoder or targets > decoder

        candidates = range(2, encoder + decoder)  # every raw token lies on one of the two sides
        fitting = bisect_right(candidates, False, key=too_long)
        return candidates[fitting - 1] if fitting else 0

    def mask(self, length: int, random: np.random.Generator) -> Mask:
        """Return which of `length` ≥ 2 tokens are hidden: kept and hidden spans take turns, a kept one first."""

        import numpy as np

        hidden, spans = self.counts(length)
        kept_lengths = _draw_partition(length - hidden, spans, random)
        hidden_lengths = _draw_partition(hidden, spans, random)
        lengths = np.stack([kept_lengths, hidden_lengths], axis=1).ravel()
        return np.repeat(np.arange(2 * spans) % 2 == 1, lengths)


def corrupt(tokens: Tokens, mask: Mask, sentinels: Tokens, eos: int) -> tuple[Tokens, Tokens]:
    """Return (encoder input, decoder target) of one text, EOS at the end of each.

    Span n is `sentinels[n]` in the input; in the target the same sentinel stands before what it hides. As in t5, no
    sentinel closes the target, since the last span ends the text.
    """
    return _insert_sentinels(tokens, mask, sentinels, eos), _insert_sentinels(tokens, ~mask, sentinels, eos)


def _insert_sentinels(tokens: Tokens, hidden: Mask, sentinels: Tokens, eos: int) -> Tokens:
    import numpy as np

    starts = hidden & ~np.concatenate([[False], hidden[:-1]])
    replaced = np.where(starts, sentinels[np.cumsum(starts) - 1], tokens)
    return np.append(replaced[starts | ~hidden], np.int32(eos))


def _draw_partition(items: int, parts: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Return the sizes of `parts` non-empty runs of `items`, every such partition equally likely."""

    import numpy as np

    cuts = np.sort(random.choice(items - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [items]]))


@dataclass(frozen=True)
class ShuffledPieces:
    """An endless stream of pieces of a corpus."""

    tokens: Tokens
    bounds: NDArray[np.int64]  # (samples per epoch, 2): begin and end in `tokens`
    seed: tuple[int, ...]
    orders: dict[int, NDArray[np.int64]] = field(default_factory=dict, repr=False)  # by epoch, the latest two

    def __call__(self, index: int) -> Tokens:
        epoch, position = divmod(index, len(self.bounds))
        begin, end = self.bounds[self._draw_order(epoch)[position]]
        return self.tokens[begin:end]

    def _draw_order(self, epoch: int) -> NDArray[np.int64]:
        import numpy as np

        if epoch not in self.orders:
            for old in sorted(self.orders)[:-1]:  # a batch may lie across the end of an epoch
                del self.orders[old]
            self.orders[epoch] = np.random.default_rng((*self.seed, 0, epoch)).permutation(len(self.bounds))
        return self.orders[epoch]


@dataclass(frozen=True)
class CorruptedText:
    """An endless stream of samples: pieces of a corpus, newly corrupted in every epoch."""

    pieces: ShuffledPieces
    noise: SpanCorruption
    sentinels: Tokens
    eos: int
    padded: frozenset[str]

    def __call__(self, index: int) -> tuple[Tokens, Tokens]:
        import numpy as np

        piece = self.pieces(index)
        mask = self.noise.mask(len(piece), np.random.default_rng((*self.pieces.seed, 1, index)))
        return corrupt(piece, mask, self.sentinels, self.eos)


@dataclass(frozen=True)
class PlainText:
    """An endless stream of samples: pieces of a corpus as they are."""

    pieces: ShuffledPieces
    end: Tokens  # what closes a piece: EOS, or nothing
    padded: frozenset[str]
    eos: int

    def __call__(self, index: int) -> tuple[Tokens]:
        import numpy as np

        return (np.concatenate([self.pieces(index), self.end]),)
