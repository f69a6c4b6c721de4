"""Data sources, one file each. The contract of such a file:

`Options`                         a pydantic model without torch: what a user may set in conf/data
`check(options, spec)`            raises UserError for what this source cannot give
`micro_batches(spec, rank)`       an endless iterator of `MicroBatch` on the host, through torch's DataLoader
`describe(spec)`                  plain facts for the record (corpus hash, tokenizer …)

Sample i of the global stream depends on (seed, i) alone: the same global batch holds the same samples whatever the
engine, the number of ranks and the accumulation.
"""

import importlib
import pkgutil
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

from bench.errors import UserError, nearest

if TYPE_CHECKING:
    from torch import Tensor


class MicroBatch(NamedTuple):
    """One forward pass's input. `tensors` are the model's keyword arguments, int64 of shape (micro, tokens)."""

    tensors: "dict[str, Tensor]"
    encoder_padding: int  # padding tokens among micro × sequence.encoder
    decoder_padding: int  # padding tokens among micro × sequence.decoder


def load(source: str) -> ModuleType:
    """Return the data source file named `source`; raise UserError if there is none."""
    known = [module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg]
    if source not in known:
        raise UserError(f"data.source={source}", "no such file in bench/data", nearest(source, known))
    return importlib.import_module(f"{__name__}.{source}")
