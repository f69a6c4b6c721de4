"""Payload bytes of every collective in a step, and the time that a rank spends in them, seen at the dispatcher.

Only for untimed steps: every operation is seen, and no collective overlaps anything.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch._C._distributed_c10d import Work
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

# Each c10d operation's name in the field, and the position of the argument that holds what nccl-tests calls its size:
# the tensor reduced or broadcast, the gathered output, the input to be scattered.
_OPERATIONS = {
    "allreduce_": ("all_reduce", 0),
    "allreduce_coalesced_": ("all_reduce", 0),
    "broadcast_": ("broadcast", 0),
    "reduce_": ("reduce", 0),
    "allgather_": ("all_gather", 0),
    "allgather_coalesced_": ("all_gather", 0),
    "_allgather_base_": ("all_gather", 0),
    "allgather_into_tensor_coalesced_": ("all_gather", 0),
    "gather_": ("gather", 0),
    "reduce_scatter_": ("reduce_scatter", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
    "scatter_": ("scatter", 1),
    "alltoall_": ("all_to_all", 1),
    "alltoall_base_": ("all_to_all", 1),
    "send": ("send", 0),
    "recv_": ("recv", 0),
}
# The same of functional collectives, which DTensor begins; "result": what they return holds it. What they write into
# somebody's tensor (`all_gather_into_tensor_out`) goes by the same names with `_` or `_out` behind them.
_FUNCTIONAL: dict[str, tuple[str, int | Literal["result"]]] = {
    "all_reduce": ("all_reduce", 0),
    "all_reduce_coalesced": ("all_reduce", 0),
    "broadcast": ("broadcast", 0),
    "all_gather_into_tensor": ("all_gather", "result"),
    "all_gather_into_tensor_coalesced": ("all_gather", "result"),
    "reduce_scatter_tensor": ("reduce_scatter", 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
    "all_to_all_single": ("all_to_all", 0),
}
_WRAPPERS = (DTensor, AsyncCollectiveTensor)
"""Tensors that stand for others."""
# Two ranks may each send before they receive: waiting for the first send would be for ever.
_NEVER_AWAITED = ("send", "recv_", "recv_any_source_")


class CollectiveCounter(TorchDispatchMode):
    """Count calls and payload bytes by kind of collective while active, and the seconds inside them: from when this
    rank's device is ready for one until it is complete.

    Every collective is awaited where it is begun. All ranks begin those of a group in one order, so none waits in vain.
    What is compiled stays compiled, and operators of higher order (flex attention) run as they are.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, wait: Callable[[], None]) -> None:
        """`wait` waits until this rank's device has done what it was given."""
        super().__init__()
        self._wait = wait
        self.calls: Counter[str] = Counter()
        self.payload_bytes: Counter[str] = Counter()
        self.inside_s = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, _WRAPPERS) for kind in types):
            return NotImplemented  # the operations on what it has on this rank come by afterwards
        if func.namespace == "_c10d_functional":
            return self._functional(func, args, kwargs)
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        operation = func._schema.name.removeprefix("c10d::")
        if operation in _OPERATIONS:
            name, position = _OPERATIONS[operation]
            self._count(name, args[position])
        if operation in _NEVER_AWAITED:
            return func(*args, **(kwargs or {}))
        return self._timed(func, args, kwargs, _wait_until_complete)

    def _functional(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A functional collective, whose result is waited for by an operation of its own: `wait_tensor`."""
        operation = func._schema.name.removeprefix("_c10d_functional::").removesuffix("_out").removesuffix("_")
        result = self._timed(func, args, kwargs, _complete_functional)
        if operation in _FUNCTIONAL:
            name, position = _FUNCTIONAL[operation]
            self._count(name, result if position == "result" else args[position])
        return result

    def _count(self, name: str, payload: Any) -> None:
        self.calls[name] += 1
        self.payload_bytes[name] += sum(tensor.nbytes for tensor in _list_tensors(payload))

    def _timed(self, func: Any, args: Any, kwargs: Any, complete: Callable[[Any], None]) -> Any:
        self._wait()
        begin = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        complete(result)
        self._wait()
        self.inside_s += time.perf_counter() - begin
        return result


def _wait_until_complete(result: Any) -> None:
    """Wait for what a c10d operation has begun: it returns its Work, boxed for TorchScript, alone or after tensors."""
    work = result[-1] if isinstance(result, tuple) else result
    if isinstance(work, torch.ScriptObject):
        Work.unbox(work).wait()


def _complete_functional(result: Any) -> None:
    """Wait for what a functional collective has begun; the program's own wait then finds nothing left."""
    for tensor in _list_tensors(result):
        torch.ops._c10d_functional.wait_tensor(tensor)


def _list_tensors(argument: Any) -> Iterable[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from _list_tensors(part)


def wait_for(device: torch.device) -> None:
    """Wait until `device` has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
