"""Weights that follow from a seed, the same on every rank and in every engine."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DRAWN_AT_ONCE = 2**24
"""Elements: no second copy of a large parameter in fp32 raises the peak of memory."""


class SkippedInitialisation(TorchFunctionMode):
    """Makes torch.nn.init do nothing: a family overwrites all of it, and the largest models would take minutes."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


def draw(parameter: torch.nn.Parameter, deviation: float, seed: int) -> None:
    """Fill one whole parameter with normal numbers. They are drawn in fp32 on its device and rounded to its type, so
    bf16 weights are the rounded fp32 ones."""
    generator = torch.Generator(parameter.device).manual_seed(seed)
    for piece in parameter.view(-1).split(DRAWN_AT_ONCE):
        drawn = torch.empty(piece.shape, dtype=torch.float32, device=piece.device)
        piece.copy_(drawn.normal_(0.0, deviation, generator=generator))
