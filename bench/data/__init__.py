"""Data sources, one file each. A data source defines these members:

- `Options`: a pydantic model without torch, with the keys of conf/data that a user may set.
- `check(options, spec)`: raises UserError for a spec that this source does not support.
- `micro_batches(spec, data_rank)`: returns an endless iterator of `MicroBatch` on the host, from torch's DataLoader.
- `describe(spec)`: returns facts for the record as plain values, such as the corpus hash and the tokenizer.
- `has_fixed_targets(spec)`: optional; returns True if every sample has the same number of target tokens.

A source for trainings of a fixed length also holds out data for evaluation (`bench.core.plugins.HeldOutDataPlugin`).

Sample i of the global sample stream depends only on (seed, i). A global batch therefore contains the same samples for
every engine, number of ranks and number of micro-steps. Ranks that share a model copy get the same micro-batches.
"""

from typing import TYPE_CHECKING, NamedTuple

from bench.core import plugins
from bench.core.plugins import DataPlugin, HeldOutDataPlugin
from bench.core.spec import RunSpec

if TYPE_CHECKING:
    from torch import Tensor


class MicroBatch(NamedTuple):
    """Input of one forward pass. `tensors` maps keyword arguments of the model to int64 tensors of shape (micro,
    sequence length)."""

    tensors: "dict[str, Tensor]"
    padding: dict[str, int]  # by kind: how many of the micro × sequence.<kind> tokens are padding


def load(source: str) -> DataPlugin:
    """Return the data source with this name. Raise UserError if there is none."""
    return plugins.load(plugins.DATA, source)


def load_held_out(source: str) -> HeldOutDataPlugin:
    """Return the data source with this name. Raise UserError if there is none, or if it cannot hold out data for
    evaluation."""
    return plugins.load(plugins.HELD_OUT_DATA, source)


def can_hold_out(source: str) -> bool:
    """Return True if the data source can hold out data for evaluation."""
    return all(hasattr(load(source), member) for member in plugins.HELD_OUT_DATA.members)


def vocabulary(spec: RunSpec) -> int:
    """Return the vocabulary size of the model in `spec`."""
    family = plugins.load(plugins.FAMILY, spec.model.family)
    return family.vocabulary(family.Shape.model_validate(spec.model.shape))
