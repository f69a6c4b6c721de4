"""Span corruption, the pre-training objective of T5, mT5 and ByT5, and endless streams of samples from a corpus. Each
epoch contains every piece of the corpus once, in a new random order.

Span corruption is described in Raffel et al., JMLR 21 (2020), section 3.1.4. The arithmetic follows
`random_spans_helper` and `random_spans_noise_mask` in google-research/text-to-text-transfer-transformer,
t5/data/preprocessors.py.
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
    """Settings of span corruption: the share of tokens that are hidden, and the mean length of a hidden span."""

    density: float  # share of the raw tokens, above 0 and below 1
    mean_length: float  # tokens, at least 1

    def counts(self, length: int) -> tuple[int, int]:
        """Return the number of hidden tokens and the number of hidden spans in `length` raw tokens, `length` ≥ 2. Both
        numbers depend only on `length`; the positions of the spans are random.

        At least one token is hidden and at least one is kept. If there are fewer kept tokens than spans, T5's own
        function fails, and this function reduces the number of spans.
        """
        hidden = min(max(round(length * self.density), 1), length - 1)
        spans = max(round(hidden / self.mean_length), 1)
        return hidden, min(spans, hidden, length - hidden)

    def lengths(self, length: int) -> tuple[int, int]:
        """Return the number of encoder tokens and of decoder tokens for `length` raw tokens. Both numbers include one
        sentinel (the token that stands for a hidden span) per span, and one EOS."""
        hidden, spans = self.counts(length)
        return length - hidden + spans + 1, hidden + spans + 1

    def raw_length(self, encoder: int, decoder: int) -> int:
        """Return the number of raw tokens for the longest sample that fits the sequence lengths of encoder and decoder;
        0 if even a sample from 2 raw tokens does not fit.

        This sample fills the encoder's sequence, unless the decoder's sequence length is the limit. A sequence that is
        not full is padded.
        """

        def too_long(length: int) -> bool:
            inputs, targets = self.lengths(length)
            return inputs > encoder or targets > decoder

        candidates = range(2, encoder + decoder)  # upper bound: every raw token is in one of the two sequences
        fitting = bisect_right(candidates, False, key=too_long)
        return candidates[fitting - 1] if fitting else 0

    def mask(self, length: int, random: np.random.Generator) -> Mask:
        """Return a mask of shape (length,), True for hidden tokens; `length` ≥ 2. Kept and hidden spans alternate, and
        the first span is kept."""
        import numpy as np

        hidden, spans = self.counts(length)
        kept_lengths = _draw_partition(length - hidden, spans, random)
        hidden_lengths = _draw_partition(hidden, spans, random)
        lengths = np.stack([kept_lengths, hidden_lengths], axis=1).ravel()  # (2 × spans,)
        return np.repeat(np.arange(2 * spans) % 2 == 1, lengths)


def corrupt(tokens: Tokens, mask: Mask, sentinels: Tokens, eos: int) -> tuple[Tokens, Tokens]:
    """Return encoder input and decoder target of a corrupted text, each with EOS at the end.

    In the input, the token `sentinels[n]` replaces hidden span n. In the target, the same token precedes the tokens of
    this span. As in T5, the target has no final sentinel, because the last span ends the text.
    """
    return _insert_sentinels(tokens, mask, sentinels, eos), _insert_sentinels(tokens, ~mask, sentinels, eos)


def _insert_sentinels(tokens: Tokens, hidden: Mask, sentinels: Tokens, eos: int) -> Tokens:
    import numpy as np

    # True at the first token of each hidden span, which the sentinel replaces.
    starts = hidden & ~np.concatenate([[False], hidden[:-1]])
    replaced = np.where(starts, sentinels[np.cumsum(starts) - 1], tokens)
    return np.append(replaced[starts | ~hidden], np.int32(eos))


def _draw_partition(items: int, parts: int, random: np.random.Generator) -> NDArray[np.int64]:
    """Divide `items` tokens into `parts` consecutive groups that are not empty, and return the sizes of the groups,
    shape (parts,). All such divisions are equally likely."""
    import numpy as np

    cuts = np.sort(random.choice(items - 1, parts - 1, replace=False)) + 1
    return np.diff(np.concatenate([[0], cuts, [items]]))


@dataclass(frozen=True)
class ShuffledPieces:
    """An endless stream of the pieces of a corpus, shuffled anew in each epoch."""

    tokens: Tokens
    bounds: NDArray[np.int64]  # (pieces, 2): start and end of each piece in `tokens`
    seed: tuple[int, ...]
    orders: dict[int, NDArray[np.int64]] = field(default_factory=dict, repr=False)  # of the two latest epochs

    def __call__(self, index: int) -> Tokens:
        epoch, position = divmod(index, len(self.bounds))
        begin, end = self.bounds[self._draw_order(epoch)[position]]
        return self.tokens[begin:end]

    def _draw_order(self, epoch: int) -> NDArray[np.int64]:
        import numpy as np

        # Drawing a permutation of the whole corpus is slow, so the samples of an epoch share it.
        if epoch not in self.orders:
            for old in sorted(self.orders)[:-1]:  # keep two orders, because a batch may span two epochs
                del self.orders[old]
            self.orders[epoch] = np.random.default_rng((*self.seed, 0, epoch)).permutation(len(self.bounds))
        return self.orders[epoch]


@dataclass(frozen=True)
class CorruptedText:
    """An endless stream of samples for span corruption. Each piece of the corpus is corrupted differently in each
    epoch."""

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
    """An endless stream of samples that are pieces of a corpus without changes."""

    pieces: ShuffledPieces
    end: Tokens  # appended to each piece: EOS, or nothing
    padded: frozenset[str]
    eos: int

    def __call__(self, index: int) -> tuple[Tokens]:
        import numpy as np

        return (np.concatenate([self.pieces(index), self.end]),)
