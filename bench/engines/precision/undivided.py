"""Of engines whose ranks hold parameters whole: how a model is built, and what its parameters are."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from bench.engines.precision import on_device
from bench.spec import RunSpec

if TYPE_CHECKING:
    from torch.nn import Parameter


def construction(spec: RunSpec) -> AbstractContextManager[Any]:
    """Return the context in which the model, or a part of it, is built: on this rank's device, in the run's
    precision."""
    return on_device(spec.precision)


def whole(parameters: "Sequence[Parameter]") -> AbstractContextManager[Any]:
    """Return a context that does nothing: a rank holds every parameter that it has."""
    return nullcontext()


def parameter_count(parameters: "Iterable[Parameter]") -> int:
    """Return the elements of all `parameters`."""
    return sum(parameter.numel() for parameter in parameters)
