"""Random tokens of fixed lengths: the input that costs nothing to make, has no padding, and is the same everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from bench.data import MicroBatch, vocabulary
from bench.errors import UserError
from bench.spec import Frozen, RunSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_FIRST_WORD = 2  # 0 pads and 1 ends a sequence in every T5 family


class Options(Frozen):
    """Nothing to choose: lengths, vocabulary and seed are those of the RunSpec."""


def check(options: Options, spec: RunSpec) -> None:
    """Raise UserError if the vocabulary holds nothing but special tokens."""
    known = vocabulary(spec)
    if known <= _FIRST_WORD:
        raise UserError(
            f"model.shape.vocab={known}",
            "synthetic data leaves out ids 0 (pad) and 1 (EOS)",
            f"give at least {_FIRST_WORD + 1}",
        )


def micro_batches(spec: RunSpec, rank: int) -> Iterator[MicroBatch]:
    """Return the endless micro-batches of `rank`: `input_ids` and `labels` only.

    No attention mask: there is no padding, and transformers would synchronise with the device to find that out.
    """
    from bench.data.pipeline import loader

    sequence = spec.sequence
    samples = RandomTokens(spec.seed, vocabulary(spec), sequence.encoder, sequence.decoder)
    return loader.micro_batches(samples, spec, rank)


def describe(spec: RunSpec) -> dict[str, Any]:
    """Return the facts for the record."""
    return {"source": "synthetic", "vocabulary": vocabulary(spec)}


@dataclass(frozen=True)
class RandomTokens:
    """An endless stream of samples, tokens uniform over the vocabulary without pad and EOS."""

    seed: int
    vocabulary: int
    encoder: int
    decoder: int

    pads_encoder = False

    def __call__(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        import numpy as np

        random = np.random.default_rng((self.seed, index))
        tokens = random.integers(_FIRST_WORD, self.vocabulary, self.encoder + self.decoder)
        return tokens[: self.encoder], tokens[self.encoder :]
