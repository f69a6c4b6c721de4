"""Samples made of the pieces of a corpus, endless: every epoch takes all pieces, in an order of its own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.data.pipeline import spans
from bench.data.pipeline.spans import SpanCorruption

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bench.data.pipeline.spans import Tokens


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
        return spans.corrupt(piece, mask, self.sentinels, self.eos)


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
