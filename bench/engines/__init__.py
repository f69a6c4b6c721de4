"""Training engines, one file each. The contract of such a file:

`Options`                        a pydantic model without torch: what a user may set in conf/engine
`check(options, spec, device)`   raises UserError for what this engine cannot do. `device` is "cpu" or "cuda", or None
                                 where nobody knows yet: rules about the device are then left to a later check
`construction(spec)`             a context in which the model is built: on this rank's device, in the run's precision
                                 (stage 3 partitions there). Model classes must have been imported before
`whole(parameters)`              a context in which partitioned parameters are whole; rank 0's changes to them stay
`parameter_count(module)`        elements in all, partitions of other ranks included
`build(module, spec)`            an `Engine`. The process group exists; the module is initialised, its forward takes
                                 the tensors of a micro-batch by name and returns an object with a `loss`

Packages in this folder hold what engines share and are no engines.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from bench import plugins
from bench.plugins import EnginePlugin

if TYPE_CHECKING:
    from torch import Tensor


class Engine(Protocol):
    """A model ready to train."""

    def train_step(self, micro_batches: "Iterable[dict[str, Tensor]]") -> "Tensor":
        """Make one optimizer step; return its mean loss on this rank as a detached 0-d device tensor, unsynchronised.

        `micro_batches` are `batch.accumulation` dicts of tensors on this rank's device. Each is fetched when it is
        taken: the one behind it is loaded while it is computed with, so none is taken ahead.
        """
        ...

    def gradient_norm(self) -> "Tensor | float | None":
        """Return the last step's global L2 norm before clipping, unsynchronised; None where the engine keeps none."""
        ...

    def skipped_steps(self) -> int:
        """Return how many updates were skipped so far because a gradient was not finite."""
        ...

    def config(self) -> dict[str, Any]:
        """Return what the engine was really given, in plain types, for the record."""
        ...


def load(backend: str) -> EnginePlugin:
    """Return the engine file named `backend`; raise UserError if there is none."""
    return plugins.load(plugins.ENGINE, backend)
