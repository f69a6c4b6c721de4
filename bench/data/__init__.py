"""Data sources, one file each. Members of such a file:

- `Options`: a pydantic model without torch, with the keys of conf/data that a user may set.
- `check(options, spec)`: raises UserError for a spec that this source does not support.
- `micro_batches(spec, data_rank)`: an endless iterator of `MicroBatch` on the host, through torch's DataLoader.
- `describe(spec)`: facts for the record as plain values (corpus hash, tokenizer …).
- `has_fixed_targets(spec)`: optional, True if every sample has the same number of target tokens.

A source for trainings with an end holds out a part for evaluation (`bench.core.plugins.HeldOutDataPlugin`).

Sample i of the global stream depends on (seed, i) alone, so that a global batch holds the same samples for every
engine, number of ranks and accumulation. Ranks of one data-parallel rank get the same micro-batches.
"""

from typing import TYPE_CHECKING, NamedTuple

from bench.core import plugins
from bench.core.plugins import DataPlugin, HeldOutDataPlugin
from bench.core.spec import RunSpec

if TYPE_CHECKING:
    from torch import Tensor


class MicroBatch(NamedTuple):
    """Input of one forward pass. `tensors` are the model's keyword arguments, int64 of shape (micro, tokens)."""

    tensors: "dict[str, Tensor]"
    padding: dict[str, int]  # number of padding tokens among micro × sequence.<kind>, by kind


def load(source: str) -> DataPlugin:
    """Return the data source named `source`; UserError if there is none."""
    return plugins.load(plugins.DATA, source)


def load_held_out(source: str) -> HeldOutDataPlugin:
    """Return the data source named `source`; UserError if it has no held-out data."""
    return plugins.load(plugins.HELD_OUT_DATA, source)


def can_hold_out(source: str) -> bool:
    """Return True if a data source has held-out data."""
    return all(hasattr(load(source), member) for member in plugins.HELD_OUT_DATA.members)


def vocabulary(spec: RunSpec) -> int:
    """Return the size of the vocabulary of the model of `spec`."""
    family = plugins.load(plugins.FAMILY, spec.model.family)
    return family.vocabulary(family.Shape.model_validate(spec.model.shape))
