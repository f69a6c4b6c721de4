"""Code that several families share, with torch; not a family.

Weights follow from a seed, the same on every rank and in every engine. Parts of a model are built without memory, taken
out of the whole, and only then given memory.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from bench.engines.precision import DRAWN_AT_ONCE

AnyModule = TypeVar("AnyModule", bound=Module)


class SkippedInitialisation(TorchFunctionMode):
    """Disables torch.nn.init: a family overwrites all weights, and for the largest models it would take minutes."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


def draw(parameter: torch.nn.Parameter, deviation: float, seed: int) -> None:
    """Fill one whole parameter with normal numbers. They are drawn in fp32 on its device and rounded to its type, so
    bf16 weights are the rounded fp32 weights."""
    generator = torch.Generator(parameter.device).manual_seed(seed)
    for piece in parameter.view(-1).split(DRAWN_AT_ONCE):
        drawn = torch.empty(piece.shape, dtype=torch.float32, device=piece.device)
        piece.copy_(drawn.normal_(0.0, deviation, generator=generator))


def materialise(make: Callable[[], AnyModule], construction: AbstractContextManager[Any] | None) -> AnyModule:
    """Return the module of `make`, with memory where `construction` places it. Modules that `make` drops never have
    memory. Tied parameters are separate afterwards."""
    with construction or nullcontext(), SkippedInitialisation():
        # the context decides the device; inside it the module itself is built on the meta device
        place = torch.empty(()).device
        with torch.device("meta"):
            part = make()
        assert next(part.buffers(), None) is None, "a buffer's content would be lost"
        return part.to_empty(device=place)


class NumberedBlocks(Module):
    """Some blocks of a stack under their numbers in it; iteration yields them in their order."""

    def __init__(self, blocks: Iterable[Module], numbers: range) -> None:
        super().__init__()
        for number, block in enumerate(blocks):
            if number in numbers:
                self.add_module(str(number), block)
        self.numbers = numbers

    def __iter__(self) -> Iterator[Module]:
        return (self.get_submodule(str(number)) for number in self.numbers)
