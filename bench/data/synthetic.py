"""Data source of random tokens with fixed sequence lengths, for any objective. Its samples take almost no time to make,
need no padding, and are the same on every machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from bench.core.errors import UserError
from bench.core.spec import Frozen, RunSpec
from bench.data import MicroBatch, vocabulary

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FIRST_WORD = 2  # ids 0 and 1 are padding and EOS in T5 families; other families may skip them, too


class Options(Frozen):
    """Options of synthetic data: none. Sequence lengths, vocabulary and seed come from the RunSpec."""


def check(options: Options, spec: RunSpec) -> None:
    """Raise UserError if the vocabulary contains only special tokens."""
    known = vocabulary(spec)
    if known <= _FIRST_WORD:
        rule = "synthetic data excludes ids 0 (pad) and 1 (EOS)"
        raise UserError(f"model.shape.vocab={known}", rule, f"give at least {_FIRST_WORD + 1}")


def micro_batches(spec: RunSpec, data_rank: int) -> Iterator[MicroBatch]:
    """Return the endless stream of micro-batches of a data-parallel rank, without masks.

    Masks are not needed because there is no padding. If a mask were given, the library transformers would synchronise
    with the device to find out that the mask hides no token.
    """
    from bench.data.pipeline import loader

    samples = RandomTokens(spec.seed, vocabulary(spec), tuple(spec.sequence.values()))
    return loader.micro_batches(samples, spec, data_rank)


def describe(spec: RunSpec) -> dict[str, Any]:
    """Return the facts about the data for the record."""
    return {"source": "synthetic", "vocabulary": vocabulary(spec)}


def has_fixed_targets(spec: RunSpec) -> bool:
    """Return True, because every sample has the full length."""
    return True


@dataclass(frozen=True)
class RandomTokens:
    """An endless stream of samples. All tokens of the vocabulary are equally likely, except padding and EOS, which
    never occur."""

    seed: int
    vocabulary: int
    lengths: tuple[int, ...]  # sequence length of each kind of tokens

    padded: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, index: int) -> tuple[NDArray[np.int64], ...]:
        import numpy as np

        random = np.random.default_rng((self.seed, index))
        tokens = random.integers(_FIRST_WORD, self.vocabulary, sum(self.lengths))
        return tuple(np.split(tokens, list(accumulate(self.lengths[:-1]))))
