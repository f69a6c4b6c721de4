"""What precision asks of every engine: where and in which type a model is built, and what that means for engines whose
ranks hold parameters whole.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from bench.core.spec import Precision, RunSpec

if TYPE_CHECKING:
    import torch
    from torch.nn import Parameter


def torch_dtype(precision: Precision) -> "torch.dtype":
    """Return the type of weights and activations."""
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[precision]


@contextmanager
def on_device(precision: Precision) -> Iterator[None]:
    """Build modules on this rank's device and in `precision` from the start.

    deepspeed.zero.Init does the same. A generator draws other numbers on a GPU than on a CPU, so engines start from
    the same weights only if every one initialises them on the device; and no fp32 copy raises the peak of memory.
    """
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch_dtype(precision))
    try:
        with _find_device():
            yield
    finally:
        torch.set_default_dtype(before)


def _find_device() -> "torch.device":
    """This rank's GPU; where there is none, or the CPU was asked for in the way that DeepSpeed listens to, the CPU."""
    import torch

    if torch.cuda.is_available() and os.environ.get("DS_ACCELERATOR") != "cpu":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


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
