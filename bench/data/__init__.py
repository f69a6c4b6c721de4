"""Data sources, one file each. The contract of such a file:

`Options`                         a pydantic model without torch: what a user may set in conf/data
`check(options, spec)`            raises UserError for what this source cannot give
`micro_batches(spec, data_rank)`  an endless iterator of `MicroBatch` on the host, through torch's DataLoader
`describe(spec)`                  plain facts for the record (corpus hash, tokenizer …)
`has_fixed_targets(spec)`         optional: whether every sample has the same number of target tokens; absent is no

A source for trainings with an end holds a part back to evaluate on (`bench.core.plugins.HeldOutDataPlugin`).

Sample i of the global stream depends on (seed, i) alone: the same global batch holds the same samples whatever the
engine, the number of ranks and the accumulation. Ranks of one data-parallel rank get the same micro-batches.
"""

from typing import TYPE_CHECKING, NamedTuple

from bench.core import plugins
from bench.core.plugins import DataPlugin, HeldOutDataPlugin
from bench.core.spec import RunSpec

if TYPE_CHECKING:
    from torch import Tensor


class MicroBatch(NamedTuple):
    """One forward pass's input. `tensors` are the model's keyword arguments, int64 of shape (micro, tokens)."""

    tensors: "dict[str, Tensor]"
    padding: dict[str, int]  # by kind of tokens, those of the micro × sequence.<kind> that are padding


def load(source: str) -> DataPlugin:
    """Return the data source file named `source`; raise UserError if there is none."""
    return plugins.load(plugins.DATA, source)


def load_held_out(source: str) -> HeldOutDataPlugin:
    """Return the data source named `source`; raise UserError if it holds nothing back to evaluate on."""
    return plugins.load(plugins.HELD_OUT_DATA, source)


def can_hold_out(source: str) -> bool:
    """Whether a data source holds something back to evaluate on."""
    return all(hasattr(load(source), member) for member in plugins.HELD_OUT_DATA.members)


def vocabulary(spec: RunSpec) -> int:
    """Return the number of tokens that the model of `spec` knows."""
    family = plugins.load(plugins.FAMILY, spec.model.family)
    return family.vocabulary(family.Shape.model_validate(spec.model.shape))
