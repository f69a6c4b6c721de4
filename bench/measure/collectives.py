"""Payload bytes of every collective in a step, and the time that a rank spends in them, seen at the dispatcher.

Only for untimed steps: every operation is seen, and no collective overlaps anything.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._C._distributed_c10d import Work
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
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        operation = func._schema.name.removeprefix("c10d::")
        if operation in _OPERATIONS:
            name, position = _OPERATIONS[operation]
            self.calls[name] += 1
            self.payload_bytes[name] += sum(tensor.nbytes for tensor in _tensors(args[position]))
        if operation in _NEVER_AWAITED:
            return func(*args, **(kwargs or {}))
        self._wait()
        begin = time.perf_counter()
        result = func(*args, **(kwargs or {}))
        _complete(result)
        self._wait()
        self.inside_s += time.perf_counter() - begin
        return result


def _complete(result: Any) -> None:
    """Wait for what a c10d operation has begun: it returns its Work, boxed for TorchScript, alone or after tensors."""
    work = result[-1] if isinstance(result, tuple) else result
    if isinstance(work, torch.ScriptObject):
        Work.unbox(work).wait()


def _tensors(argument: Any) -> Iterable[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from _tensors(part)


def wait_for(device: torch.device) -> None:
    """Wait until `device` has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
