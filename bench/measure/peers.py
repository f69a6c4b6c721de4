"""The other ranks, as far as measuring needs them: agreeing on what comes next, and handing in what was seen.

The engine has its collectives; these are the harness's own, off the clock. In a rehearsal there are no others.
"""

from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


class Peers(Protocol):
    """All ranks of a run, seen from one of them."""

    @property
    def are_real(self) -> bool:
        """Whether there are as many ranks as the process group says; only then do losses mean something."""

    @property
    def is_main(self) -> bool:
        """Whether this is the rank that writes for all."""

    def barrier(self) -> None: ...

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value if `is_main`, else an empty list."""

    def all_gather(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Exchange (steps, columns) between ranks; return one (ranks, columns) tensor per step."""

    def broadcast(self, decision: T) -> T:
        """Return rank 0's decision on every rank: a rank that decided for itself could leave the others waiting."""


class ProcessGroupPeers:
    """The ranks of torch's process group."""

    are_real = True

    @property
    def is_main(self) -> bool:
        return dist.get_rank() == 0

    def barrier(self) -> None:
        dist.barrier()

    def gather(self, value: Any) -> list[Any]:
        box: list[Any] | None = [None] * dist.get_world_size() if self.is_main else None
        dist.gather_object(value, box)
        return box or []

    def all_gather(self, rows: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, rows)
        return list(torch.stack(parts, dim=1))

    def broadcast(self, decision: T) -> T:
        box = [decision]
        dist.broadcast_object_list(box, src=0)
        return box[0]


class NoPeers:
    """The one real rank of a rehearsal, whose process group only pretends to have others."""

    are_real = False
    is_main = True

    def barrier(self) -> None:
        pass

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def all_gather(self, rows: torch.Tensor) -> list[torch.Tensor]:
        return list(rows.unsqueeze(1))

    def broadcast(self, decision: T) -> T:
        return decision
