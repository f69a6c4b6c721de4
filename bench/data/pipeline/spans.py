"""Span corruption, the pre-training objective of T5, mT5 and ByT5, and endless samples from pieces of a corpus. Every
epoch has all pieces, in its own order.

Raffel et al., JMLR 21 (2020), section 3.1.4. The arithmetic is that of `random_spans_helper` and
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
    """Share of a text that is hidden, and the mean length of hidden spans."""

    density: float  # share of the raw tokens, above 0 and below 1
    mean_length: float  # tokens, at least 1

    def counts(self, length: int) -> tuple[int, int]:
        """Return (hidden tokens, spans) for `length` ≥ 2 raw tokens. These are fixed; only the places are random.

        At least one token is hidden and one kept. T5's own function fails for fewer kept tokens than spans; this
        function then returns fewer spans.
        """
        hidden = min(max(round(length * self.density), 1), length - 1)
        spans = max(round(hidden / self.mean_length), 1)
        return hidden, min(spans, hidden, length - hidden)

    def lengths(self, length: int) -> tuple[int, int]:
        """Return the (encoder, decoder) tokens for `length` raw tokens, with a sentinel per span and one EOS each."""
        hidden, spans = self.counts(length)
        return length - hidden + spans + 1, hidden + spans + 1

    def raw_length(self, encoder: int, decoder: int) -> int:
        """Return the maximum number of raw tokens that fit both lengths; 0 where even 2 tokens do not fit.

        The encoder's side is then full unless the decoder's is the limit. Padding fills the rest.
        """

        def too_long(length: int) -> bool:
            inputs, targets = self.lengths(length)
            return inputs > encoder or targets > decoder

        candidates = range(2, encoder + decoder)  # every raw token is on one of the two sides
        fitting = bisect_right(candidates, False, key=too_long)
        return candidates[fitting - 1] if fitting else 0

    def mask(self, length: int, random: np.random.Generator) -> Mask:
        """Return True for hidden tokens, shape (length,), length ≥ 2. Kept and hidden spans alternate, kept first."""
        import numpy as np

        hidden, spans = self.counts(length)
        kept_lengths = _draw_partition(length - hidden, spans, random)
        hidden_lengths = _draw_partition(hidden, spans, random)
        lengths = np.stack([kept_lengths, hidden_lengths], axis=1).ravel()  # (2 × spans,)
        return np.repeat(np.arange(2 * spans) % 2 == 1, lengths)


def corrupt(tokens: Tokens, mask: Mask, sentinels: Tokens, eos: int) -> tuple[Tokens, Tokens]:
    """Return (encoder input, decoder target) of one text, each with an EOS at its end.

    `sentinels[n]` replaces span n in the input; in the target it precedes the tokens of the span. As in t5, no sentinel
    closes the target, since the last span ends the text.
    """
    return _insert_sentinels(tokens, mask, sentinels, eos), _insert_sentinels(tokens, ~mask, sentinels, eos)


def _insert_sentinels(tokens: Tokens, hidden: Mask, sentinels: Tokens, eos: int) -> Tokens:
    import numpy as np

    # The first token of each hidden span, which its sentinel replaces.
    starts = hidden & ~np.concatenate([[False], hidden[:-1]])
    replaced = np.where(starts, sentinels[np.cumsum(starts) - 1], tokens)
    return np.append(replaced[starts | ~hidden], np.int32(eos))


def _draw_partition(items: int, parts: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Return the sizes of `parts` non-empty runs of `items`, shape (parts,), from a uniform draw of such partitions."""
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

        # A permutation of the whole corpus is slow to draw; samples of an epoch share it.
        if epoch not in self.orders:
            for old in sorted(self.orders)[:-1]:  # a batch may span the end of an epoch, so that two orders are kept
                del self.orders[old]
            self.orders[epoch] = np.random.default_rng((*self.seed, 0, epoch)).permutation(len(self.bounds))
        return self.orders[epoch]


@dataclass(frozen=True)
class CorruptedText:
    """An endless stream of samples: pieces of a corpus, each corrupted anew in every epoch."""

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
    """An endless stream of samples: unchanged pieces of a corpus."""

    pieces: ShuffledPieces
    end: Tokens  # appended to a piece: EOS, or nothing
    padded: frozenset[str]
    eos: int

    def __call__(self, index: int) -> tuple[Tokens]:
        import numpy as np

        return (np.concatenate([self.pieces(index), self.end]),)
