"""Payload bytes of every collective in a step, and a rank's own time before its first one, seen at the dispatcher.

Only for untimed steps: seeing every operation slows a step down.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
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


class CollectiveCounter(TorchDispatchMode):
    """Count calls and payload bytes by kind of collective while active."""

    def __init__(self, before_first: Callable[[], None]) -> None:
        """`before_first` is called right before the first collective, to wait for the device's own work until then."""
        super().__init__()
        self._before_first = before_first
        self.calls: Counter[str] = Counter()
        self.payload_bytes: Counter[str] = Counter()
        self.first_at: float | None = None  # monotonic seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name, position = _OPERATIONS.get(func._schema.name.removeprefix("c10d::"), (None, 0))
            if name:
                if self.first_at is None:
                    self._before_first()
                    self.first_at = time.perf_counter()
                self.calls[name] += 1
                self.payload_bytes[name] += sum(tensor.nbytes for tensor in _tensors(args[position]))
        return func(*args, **(kwargs or {}))


def _tensors(argument: Any) -> Iterable[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from _tensors(part)
