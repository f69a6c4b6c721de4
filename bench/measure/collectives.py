"""Payload bytes of every collective in a step, and a rank's own time before its first one, seen at the dispatcher.

Only for untimed steps: seeing every operation slows a step down.
"""

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# The argument of each c10d operation that holds what nccl-tests calls its size, by its position in the schema:
# the tensor reduced or broadcast, the gathered output, the input to be scattered.
_PAYLOAD = {
    "allreduce_": 0,
    "allreduce_coalesced_": 0,
    "broadcast_": 0,
    "reduce_": 0,
    "allgather_": 0,
    "allgather_coalesced_": 0,
    "_allgather_base_": 0,
    "allgather_into_tensor_coalesced_": 0,
    "gather_": 0,
    "reduce_scatter_": 1,
    "_reduce_scatter_base_": 1,
    "reduce_scatter_tensor_coalesced_": 1,
    "scatter_": 1,
    "alltoall_": 1,
    "alltoall_base_": 1,
    "send": 0,
    "recv_": 0,
}
_NAMES = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "gather": "gather",
    "reduce_scatter": "reduce_scatter",
    "scatter": "scatter",
    "alltoall": "all_to_all",
    "send": "send",
    "recv": "recv",
}


class CollectiveCounter(TorchDispatchMode):
    """Count calls and payload bytes by kind of collective while active."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.payload_bytes: Counter[str] = Counter()
        self.first_at: float | None = None  # monotonic seconds

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            operation = func._schema.name.removeprefix("c10d::")
            if operation in _PAYLOAD:
                kind = collective_name(operation)
                self.first_at = self.first_at or time.perf_counter()
                self.calls[kind] += 1
                self.payload_bytes[kind] += sum(t.nbytes for t in _tensors(args[_PAYLOAD[operation]]))
        return func(*args, **(kwargs or {}))


def collective_name(operation: str) -> str:
    """Return the field's name of a c10d operation: `_allgather_base_` is an all_gather."""
    stem = operation.strip("_")
    for suffix in ("_coalesced", "_base", "_tensor", "_into_tensor"):
        stem = stem.removesuffix(suffix)
    return _NAMES[stem.removesuffix("_into_tensor").removesuffix("_tensor")]


def _tensors(argument: Any) -> Iterable[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, list | tuple):
        for part in argument:
            yield from _tensors(part)
