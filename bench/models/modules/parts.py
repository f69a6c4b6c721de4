"""A part of a model: built without memory, cut out of the whole, and only then given memory."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch.nn import Module

from bench.models.modules.weights import SkippedInitialisation

AnyModule = TypeVar("AnyModule", bound=Module)


def materialise(make: Callable[[], AnyModule], construction: AbstractContextManager[Any] | None) -> AnyModule:
    """Return what `make` makes, with memory where `construction` puts it. What `make` builds and drops never has any;
    parameters that were one are several afterwards."""
    with construction or nullcontext(), SkippedInitialisation():
        place = torch.empty(()).device
        with torch.device("meta"):
            part = make()
        assert next(part.buffers(), None) is None, "a buffer's content would be lost"
        return part.to_empty(device=place)


class NumberedBlocks(Module):
    """Some blocks of a stack under the numbers that they have in it; iterating yields them in their order."""

    def __init__(self, blocks: Iterable[Module], numbers: range) -> None:
        super().__init__()
        for number, block in enumerate(blocks):
            if number in numbers:
                self.add_module(str(number), block)
        self.numbers = numbers

    def __iter__(self) -> Iterator[Module]:
        return (self.get_submodule(str(number)) for number in self.numbers)
