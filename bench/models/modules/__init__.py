"""Torch code that several model families share. This folder is not itself a family.

Initial weights depend only on a seed; they are the same on every rank and in every engine. To build a part of a model,
the whole model is created on the meta device, other parts are removed, and only then is memory allocated.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import Module
from torch.overrides import TorchFunctionMode

from bench.core.spec import RunSpec
from bench.engines.distributed.slices import TensorRanks, mark_slices
from bench.engines.precision import DRAWN_AT_ONCE
from bench.models.modules.chunked_loss import ChunkedHead


class SkippedInitialisation(TorchFunctionMode):
    """Mode in which torch.nn.init does nothing. Families set all weights themselves, and torch's initialisation would
    take minutes for the largest models."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


def draw(parameter: torch.nn.Parameter, deviation: float, seed: int) -> None:
    """Fill one whole parameter with normally distributed values of mean 0. They are drawn in fp32 on the parameter's
    device and rounded to its dtype. Weights in bf16 are therefore the rounded fp32 weights."""
    generator = torch.Generator(parameter.device).manual_seed(seed)
    for piece in parameter.view(-1).split(DRAWN_AT_ONCE):
        drawn = torch.empty(piece.shape, dtype=torch.float32, device=piece.device)
        piece.copy_(drawn.normal_(0.0, deviation, generator=generator))


def build_part(
    make: Callable[[], Module], spec: RunSpec, construction: AbstractContextManager[Any] | None,
    among: TensorRanks | None, dimensions: Mapping[str, int], embedding: str,
) -> Module:  # fmt: skip
    """Let `make` create a part of a model on the meta device, and allocate the part's memory on the device that the
    context `construction` sets. No memory is allocated for submodules that `make` drops.

    A part has the attributes `part` and `tied` and, if it has the head, `lm_head`. Allocation separates tied
    parameters. So a tied head is tied again to the embedding, whose parameter name is `embedding`. With the setting
    `model.loss_chunk_tokens`, the head computes a chunked loss.

    `among` are the tensor-parallel ranks that share the part's matrices; None if the matrices are not sliced.
    `dimensions` maps the names of modules to the dimension in which their weights are sliced.
    """
    with construction or nullcontext(), SkippedInitialisation():
        # the context decides the final device; within it the module is built on the meta device
        place = torch.empty(()).device
        with torch.device("meta"):
            built: Any = make()
        assert next(built.buffers(), None) is None, "a buffer's content would be lost"
        built.to_empty(device=place)
    if built.part.last and built.tied:
        built.lm_head.weight = built.get_parameter(embedding)
    if built.part.last and spec.model.loss_chunk_tokens:
        built.lm_head = ChunkedHead(built.lm_head, spec.model.loss_chunk_tokens)
    if among is not None:
        mark_slices(built, dimensions, among)
    return built  # type: ignore[no-any-return]


class NumberedBlocks(Module):
    """Some blocks of a stack, each under its number in the whole stack. Iteration yields them in order."""

    def __init__(self, blocks: Iterable[Module], numbers: range) -> None:
        super().__init__()
        for number, block in enumerate(blocks):
            if number in numbers:
                self.add_module(str(number), block)
        self.numbers = numbers

    def __iter__(self) -> Iterator[Module]:
        return (self.get_submodule(str(number)) for number in self.numbers)
