"""Random tokens of fixed lengths, for any objective: almost free to make, without padding, and the same everywhere."""

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

_FIRST_WORD = 2  # 0 pads and 1 ends a sequence in T5 families; harmless for other families


class Options(Frozen):
    """No options: lengths, vocabulary and seed come from the RunSpec."""


def check(options: Options, spec: RunSpec) -> None:
    """Raise UserError if the vocabulary has only special tokens."""
    known = vocabulary(spec)
    if known <= _FIRST_WORD:
        rule = "synthetic data excludes ids 0 (pad) and 1 (EOS)"
        raise UserError(f"model.shape.vocab={known}", rule, f"give at least {_FIRST_WORD + 1}")


def micro_batches(spec: RunSpec, data_rank: int) -> Iterator[MicroBatch]:
    """Return the endless micro-batches of a data-parallel rank, without masks.

    There is no padding, and transformers would synchronise with the device to detect that.
    """
    from bench.data.pipeline import loader

    samples = RandomTokens(spec.seed, vocabulary(spec), tuple(spec.sequence.values()))
    return loader.micro_batches(samples, spec, data_rank)


def describe(spec: RunSpec) -> dict[str, Any]:
    """Return the facts for the record."""
    return {"source": "synthetic", "vocabulary": vocabulary(spec)}


def has_fixed_targets(spec: RunSpec) -> bool:
    """Return True: every sample is full."""
    return True


@dataclass(frozen=True)
class RandomTokens:
    """An endless stream of samples, tokens uniform over the vocabulary without pad and EOS."""

    seed: int
    vocabulary: int
    lengths: tuple[int, ...]  # by kind

    padded: ClassVar[frozenset[str]] = frozenset()

    def __call__(self, index: int) -> tuple[NDArray[np.int64], ...]:
        import numpy as np

        random = np.random.default_rng((self.seed, index))
        tokens = random.integers(_FIRST_WORD, self.vocabulary, sum(self.lengths))
        return tuple(np.split(tokens, list(accumulate(self.lengths[:-1]))))
