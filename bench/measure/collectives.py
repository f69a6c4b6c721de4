"""Counter of collectives in a step: payload bytes of each kind, and the time that a rank spends in collectives.

The counter intercepts torch's dispatcher. It is only for untimed steps, because every operation then passes through
Python and no collective overlaps with other work.
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

# For each c10d operation: the usual name of the collective, and the position of the argument with the payload. The
# payload is defined as in nccl-tests: the reduced or broadcast tensor, the gathered output, or the scattered input.
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
# The same for the functional collectives that DTensor calls. With "result", the returned tensor is the payload. Some
# variants write into a given tensor. Their names have `_` or `_out` appended (`all_gather_into_tensor_out`).
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
"""Tensor subclasses that wrap the tensors that collectives transfer."""
# Operations that the counter does not wait for. Two ranks may both send before they receive, and waiting for a send
# would deadlock.
_NEVER_AWAITED = ("send", "recv_", "recv_any_source_")


class CollectiveCounter(TorchDispatchMode):
    """Dispatch mode that counts calls and payload bytes of collectives by kind, and the seconds spent in all
    collectives.

    The time of a collective starts when this rank's device has finished its earlier work, and ends when the collective
    is complete. The counter waits for every collective immediately after its launch. All ranks launch the collectives
    of a group in the same order, so waiting cannot deadlock. Under this mode compiled code stays compiled, and
    higher-order operators such as flex attention run unchanged.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self, wait: Callable[[], None]) -> None:
        """Create a counter. The function `wait` returns when this rank's device has finished all launched work."""
        super().__init__()
        self._wait = wait
        self.calls: Counter[str] = Counter()
        self.payload_bytes: Counter[str] = Counter()
        self.inside_s = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(kind, _WRAPPERS) for kind in types):
            # The operations on the wrapped tensors are dispatched afterwards.
            return NotImplemented
        if func.namespace not in ("c10d", "_c10d_functional"):
            return func(*args, **kwargs)
        operation = func._schema.name.rpartition("::")[2]
        if func.namespace == "_c10d_functional":
            operation = operation.removesuffix("_out").removesuffix("_")
            result = self._time(func, args, kwargs, _complete_functional)
            if operation in _FUNCTIONAL:
                name, position = _FUNCTIONAL[operation]
                self._count(name, result if position == "result" else args[position])
            return result
        if operation in _OPERATIONS:
            name, index = _OPERATIONS[operation]
            self._count(name, args[index])
        if operation in _NEVER_AWAITED:
            return func(*args, **kwargs)
        return self._time(func, args, kwargs, _complete)

    def _count(self, name: str, payload: Any) -> None:
        self.calls[name] += 1
        self.payload_bytes[name] += sum(tensor.nbytes for tensor in _list_tensors(payload))

    def _time(self, func: Any, args: Any, kwargs: Any, complete: Callable[[Any], None]) -> Any:
        self._wait()  # earlier work of this rank is not part of the collective's time
        begin = time.perf_counter()
        result = func(*args, **kwargs)
        complete(result)
        self._wait()
        self.inside_s += time.perf_counter() - begin
        return result


def _complete(result: Any) -> None:
    """Wait until a c10d operation is complete.

    The operation returns a Work object, boxed for TorchScript, either alone or as the last element of a tuple. The box
    is empty for a synchronous operation of NCCL, which is part of the current stream's work.
    """
    boxed = result[-1] if isinstance(result, tuple) else result
    if isinstance(boxed, torch.ScriptObject) and (work := Work.unbox(boxed)) is not None:
        work.wait()


def _complete_functional(result: Any) -> None:
    """Wait until a functional collective is complete. A later `wait_tensor` in the program then returns at once."""
    for tensor in _list_tensors(result):
        torch.ops._c10d_functional.wait_tensor(tensor)


def _list_tensors(argument: Any) -> Iterable[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from _list_tensors(part)


def wait_for(device: torch.device) -> None:
    """Wait until `device` has finished all launched work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
