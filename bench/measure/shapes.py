"""Large operations left out: their results have shape and memory, and no values.

A rank too large for this machine is rehearsed so. Each result is allocated as ever, and counted as ever, but nobody
writes to it, so that the system gives it no pages. What a kernel allocates for itself within one operation is missing.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from bench.core.spec import MeasureSpec
from bench.measure.failures import Refused

SMALL = 4096
"""Elements that an operation may take and give together to be done all the same: scalars, losses, tokens of a text."""

PROTOCOL = MeasureSpec(warmup_steps=2, gpu_warmup_s=0, block_steps=1, min_steps=2, window_s=0)
"""The steps made then: one is as full as the next."""

_RESIZES = ("resize_", "resize_as_", "set_")
"""Mutating operations that change no value, but what a tensor is: always done, like those tagged `inplace_view`."""

_SHARES = "fsdp::all_gather_copy_in"
"""Its two results share memory, and its schema does not say so: always done."""


class LeftOutOperations(TorchDispatchMode):
    """While this is entered, operations on more than `SMALL` elements are not done on a CPU; Refused for one whose
    result's shape depends on values."""

    def __init__(self) -> None:  # typed, which the base class is not
        super().__init__()

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types:  # of DTensors, which look for shapes themselves
            return func(*args, **kwargs)
        if not all(kind in (Tensor, Parameter) for kind in types):
            return NotImplemented  # a tensor that is made of others does its operations on those
        given = _list_tensors((args, kwargs))
        elements = sum(tensor.numel() for tensor in given)
        devices = {tensor.device.type for tensor in given} | {torch.device(kwargs.get("device") or "cpu").type}
        if _is_cheap(func) or devices != {"cpu"}:
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            return func(*args, **kwargs) if elements <= SMALL else _pretend_collective(func, args, kwargs)
        if func._schema.is_mutable and all(_changes(result) for result in func._schema.returns):
            return func(*args, **kwargs) if elements <= SMALL else _return_changed(func, args, kwargs)
        shapes = _find_shapes(func, args, kwargs, elements)
        if shapes is None or elements + sum(tensor.numel() for tensor in _list_tensors(shapes)) <= SMALL:
            return func(*args, **kwargs)
        changed = iter(_list_changed(func, args, kwargs))
        results = shapes if isinstance(shapes, tuple) else (shapes,)
        made = tuple(
            next(changed) if _changes(returned) else tree_map_only(Tensor, _allocate, result)
            for returned, result in zip(func._schema.returns, results, strict=True)
        )
        return made if isinstance(shapes, tuple) else made[0]


def _is_cheap(func: Any) -> bool:
    """Whether an operation costs little to be done: a view, another shape, an answer that is no tensor."""
    makes_tensors = not func._schema.returns or any("Tensor" in str(result.type) for result in func._schema.returns)
    resizes = func._schema.name.removeprefix("aten::") in _RESIZES or torch.Tag.inplace_view in func.tags
    return func.is_view or resizes or not makes_tensors or func._schema.name == _SHARES


def _changes(returned: Any) -> bool:
    """Whether what an operation returns is an argument that it wrote to."""
    return returned.alias_info is not None and returned.alias_info.is_write


def _list_changed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operation writes to and returns, in the order in which it returns them."""
    places = {name: place for place, name in enumerate(argument.name for argument in func._schema.arguments)}
    for returned in func._schema.returns:
        if _changes(returned):
            argument = next(
                argument for argument in func._schema.arguments
                if argument.alias_info and argument.alias_info.before_set == returned.alias_info.before_set
            )  # fmt: skip
            yield kwargs[argument.name] if argument.name in kwargs else args[places[argument.name]]


def _return_changed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return what an operation returns that only writes to its arguments, which are left as they are."""
    changed = tuple(_list_changed(func, args, kwargs))
    return None if not changed else changed if len(changed) > 1 else changed[0]


def _find_shapes(func: Any, args: Sequence[Any], kwargs: dict[str, Any], elements: int) -> Any:
    """Return an operation's results without memory; None of a small one for which nothing but doing it tells them."""
    taken = tree_map_only(Tensor, _describe, (tuple(args), kwargs))
    chosen = not _list_tensors(taken) or taken[1].get("device") is not None  # else it is that of what it takes
    if chosen and any(argument.name == "device" for argument in func._schema.arguments):
        taken[1]["device"] = torch.device("meta")
    try:
        return func(*taken[0], **taken[1])
    except (NotImplementedError, RuntimeError) as error:
        if elements <= SMALL:
            return None
        raise Refused(f"{func}: its result cannot be told from shapes alone: {error}") from error


def _describe(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _allocate(shape: Tensor) -> Tensor:
    """Return memory for a result. Small ones are zero: an engine may look at a norm, say, whether it is a number."""
    made = torch.empty_strided(shape.size(), shape.stride(), dtype=shape.dtype, device="cpu")
    return made.zero_() if made.numel() <= SMALL else made


def _list_tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]


def _pretend_collective(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Do a collective of a group that only pretends on nothing: some copy what this rank gave."""
    nothing = tree_map_only(Tensor, lambda tensor: tensor.new_empty(0), (tuple(args), kwargs))
    return func(*nothing[0], **nothing[1])
