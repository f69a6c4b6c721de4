"""What precision asks of every engine: where and in which type a model is built, and loss scaling for fp16."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from bench.spec import Precision

if TYPE_CHECKING:
    import torch


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
