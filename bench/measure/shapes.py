"""Rehearsal without computation. A rehearsal runs one rank of a job alone, without its peers. A rehearsal without
computation also skips large operations: their results have a shape and allocated memory, but no meaningful values.

Each result is allocated and counted as usual, but is never written to. So the operating system assigns no physical
pages to it. A rank can therefore be rehearsed on a machine whose memory is too small for the rank. Temporary memory
inside an operation's kernel is not included.

A rehearsal for a GPU also runs on the CPU. It makes the operations that torch would choose on a GPU: fused attention,
and an update of all parameters together.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from bench.core.spec import MeasureSpec
from bench.measure.failures import Refused

SMALL = 4096
"""An operation is executed if its arguments and results together have at most this number of elements. Operations on
scalars, losses and token ids have fewer elements, so they are executed."""

PROTOCOL = MeasureSpec(warmup_steps=2, gpu_warmup_s=0, block_steps=1, min_steps=2, window_s=0)
"""Measurement protocol of a rehearsal without computation. Two steps suffice, as all steps use the same memory."""

_RESIZES = ("resize_", "resize_as_", "set_")
"""In-place operations that change the shape or storage of a tensor but no values. They are always executed, as are
operations with the tag `inplace_view`."""

_COMPUTED = torch.nn.functional.scaled_dot_product_attention
"""torch's own function, which `_attend` replaces."""
_SHARES = "fsdp::all_gather_copy_in"
"""Operation of FSDP2 that is always executed. Its two results share memory, which its schema does not declare."""


class LeftOutOperations(TorchDispatchMode):
    """Dispatch mode that skips CPU operations on more than `SMALL` elements, except those that are cheap.

    Raise Refused for a large operation whose result shape depends on values.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # DTensor computes shapes with fake tensors.
        if FakeTensor in types:
            return func(*args, **kwargs)
        own = {getattr(kind, "__torch_dispatch__", None) for kind in types}
        if own - {Tensor.__torch_dispatch__}:
            # The operations on a wrapper's inner tensors are dispatched afterwards.
            return NotImplemented
        given = _list_tensors((args, kwargs))
        elements = sum(tensor.numel() for tensor in given)
        devices = {tensor.device.type for tensor in given} | {torch.device(kwargs.get("device") or "cpu").type}
        if _is_cheap(func) or devices != {"cpu"}:
            return func(*args, **kwargs)
        if func.namespace == "c10d":
            # With a fake process group, some collectives copy this rank's input. For large tensors, empty tensors are
            # passed instead, so that no copy is made.
            if elements > SMALL:
                args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.new_empty(0), (tuple(args), kwargs))
            return func(*args, **kwargs)
        if func._schema.is_mutable and all(map(_is_changed, func._schema.returns)):
            if elements <= SMALL:
                return func(*args, **kwargs)
            changed = tuple(_list_changed(func, args, kwargs))
            return None if not changed else changed if len(changed) > 1 else changed[0]
        # Elements of arguments and results are added, because small arguments may have a large result.
        shapes = _find_shapes(func, args, kwargs, elements)
        results_elements = sum(tensor.numel() for tensor in _list_tensors(shapes))
        if shapes is None or (elements + results_elements <= SMALL and not _is_of_gpu(func)):
            return func(*args, **kwargs)
        given_back = _list_changed(func, args, kwargs)
        results = shapes if isinstance(shapes, tuple) else (shapes,)
        made = tuple(
            next(given_back) if _is_changed(returned) else tree_map_only(Tensor, _allocate, result)
            for returned, result in zip(func._schema.returns, results, strict=True)
        )
        return made if isinstance(shapes, tuple) else made[0]


def _attend(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """Replacement of torch's `scaled_dot_product_attention` that calls the operation of the kernel that torch would
    choose on a GPU. A flash kernel supports only 16 bits, at most 256 elements per head, and no mask. The choice is
    that of torch 2.13 (sdp_utils.cpp), without cuDNN's kernel, which saves tensors of the same size. In fp32 or with
    a mask, heads that share keys get copies of them, as in zeroscale's own models."""
    aten = torch.ops.aten
    if query.dim() != 4:
        return _COMPUTED(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is None and query.dtype != torch.float32 and query.shape[-1] <= 256:
        attended = aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)
        return cast(Tensor, attended[0])
    if enable_gqa:  # this kernel does not support groups of heads
        key, value = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -torch.inf)
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    saves = torch.is_grad_enabled() and any(
        one is not None and one.requires_grad for one in (query, key, value, attn_mask)
    )
    attended = aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, saves, dropout_p, is_causal, scale=scale
    )
    return cast(Tensor, attended[0])


@contextlib.contextmanager
def leave_out(*, imitates_gpu: bool = False) -> Iterator[None]:
    """Context in which CPU operations on more than `SMALL` elements are skipped. With `imitates_gpu`, torch makes the
    operations that it would choose on a GPU."""

    def update_together(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            if "foreach" in group and not (group["foreach"] or group.get("fused")):
                group["foreach"] = True  # torch's default on a GPU

    with contextlib.ExitStack() as held:
        held.enter_context(LeftOutOperations())
        if imitates_gpu:
            # A TorchFunctionMode would not be active in recomputations of activation checkpointing.
            held.enter_context(mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", _attend))
            held.callback(register_optimizer_step_pre_hook(update_together).remove)
        yield


def _is_of_gpu(func: Any) -> bool:
    """Return True for an operation of `_attend`, which only a GPU can execute."""
    name = func._schema.name
    return name.startswith("aten::_scaled_dot_product_") and "_for_cpu" not in name


def _is_cheap(func: Any) -> bool:
    """Return True if an operation is cheap to execute: a view, a change of shape, or an operation that returns no
    tensor."""
    makes_tensors = not func._schema.returns or any("Tensor" in str(result.type) for result in func._schema.returns)
    resizes = func._schema.name.removeprefix("aten::") in _RESIZES or torch.Tag.inplace_view in func.tags
    return func.is_view or resizes or not makes_tensors or func._schema.name == _SHARES


def _is_changed(returned: Any) -> bool:
    """Return True if an operation's result is an argument that the operation modifies in place. `returned` describes
    the result in the operation's schema."""
    return returned.alias_info is not None and returned.alias_info.is_write


def _list_changed(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Iterator[Any]:
    """Yield the arguments that an operation modifies in place and returns, in the order of its returns."""
    arguments = func._schema.arguments
    for returned in filter(_is_changed, func._schema.returns):
        aliased = returned.alias_info.before_set
        index, name = next(
            (index, argument.name) for index, argument in enumerate(arguments)
            if argument.alias_info and argument.alias_info.before_set == aliased
        )  # fmt: skip
        yield kwargs[name] if name in kwargs else args[index]


def _find_shapes(func: Any, args: Sequence[Any], kwargs: dict[str, Any], elements: int) -> Any:
    """Return the results of an operation as tensors on the meta device, which have a shape and no memory. `elements` is
    the total number of elements of the operation's arguments.

    Some shapes depend on values, so they are unknown before the operation is executed. In this case, return None if the
    operation is small enough to be executed, and raise Refused if it is larger.
    """
    taken = tree_map_only(Tensor, _describe, (tuple(args), kwargs))
    # An operation runs on the device of its tensor arguments, unless it has an argument `device`.
    names_device = not _list_tensors(taken) or taken[1].get("device") is not None
    if names_device and any(argument.name == "device" for argument in func._schema.arguments):
        taken[1]["device"] = torch.device("meta")
    try:
        return func(*taken[0], **taken[1])
    except (NotImplementedError, RuntimeError) as error:
        if elements <= SMALL:
            return None
        raise Refused(f"{func}: the shape of its result depends on values: {error}") from error


def _describe(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _allocate(result: Tensor) -> Tensor:
    """Return an allocated CPU tensor for the result of an operation. `result` is a tensor on the meta device with the
    shape, strides and dtype of this result.

    Small results are filled with zeros, since an engine may check, for example, that a gradient norm is finite.
    """
    made = torch.empty_strided(result.size(), result.stride(), dtype=result.dtype, device="cpu")
    return made.zero_() if made.numel() <= SMALL else made


def _list_tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor)]
