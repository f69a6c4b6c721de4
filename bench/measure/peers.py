"""The ranks of a run: how they find each other, and how they agree and exchange results outside of timed steps.

The harness has collectives of its own, apart from the engine's. In a rehearsal a rank has no real peers.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bench.core.record import Limits
from bench.core.scheduling import JobContext, find_foreign
from bench.measure.channel import LISTENER
from bench.measure.failures import Refused

T = TypeVar("T")


class Peers:
    """All ranks of a run, seen from one of them. This class is the one rank of a rehearsal, which has no real peers."""

    are_real = False
    """True if all ranks of the process group exist; only then do losses mean something."""

    @property
    def is_main(self) -> bool:
        """True on the rank that writes for all."""
        return True

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value if `is_main`, else an empty list."""
        return [value]

    def all_gather(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Exchange (steps, columns) between ranks; return one (ranks, columns) tensor per step."""
        return list(rows.unsqueeze(1))

    def broadcast(self, decision: T) -> T:
        """Return rank 0's decision on every rank. Ranks that decide by themselves could wait for each other forever."""
        return decision


class ProcessGroupPeers(Peers):
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


class RankPlace(NamedTuple):
    """Place of a rank: its host, and the start of the scheduler's job that it belongs to."""

    host: str
    job_id: str  # empty outside of a job
    restart: int = 0

    @classmethod
    def of(cls, host: str, context: JobContext) -> "RankPlace":
        return cls(host, context.job_id, context.restart)

    def describe_job(self) -> str:
        """Return the job in words."""
        return f"{self.job_id or None}" + (f", restart {self.restart}" if self.restart else "")


def check_places(places: Sequence[RankPlace], nodelist: str) -> None:
    """Raise Refused unless all ranks were started in one allocation: others use nodes that the run was not given.

    A rank is foreign if it is of another job than rank 0, of another start of it, or on a host that is not in rank 0's
    `nodelist`.
    """
    first, *others = places
    for place in others:
        if place[1:] != first[1:]:
            of_first = f"the first node {first.host} of {first.describe_job()}"
            raise Refused(f"{place.host} is of job {place.describe_job()}, and {of_first}")
    if foreign := find_foreign(tuple(dict.fromkeys(place.host for place in places)), nodelist):
        raise Refused(f"{', '.join(foreign)} is not in this job's allocation, which has {nodelist}")


# After the supervisor's own limit, so that its reason is recorded, and not a timeout of torch.
_LATER_S = 60.0
_LONGEST_S = 30 * 86400.0


def compute_timeout(limits: Limits) -> timedelta:
    """Return how long torch waits for another rank: longer than the supervisor, which ends a hang and reports why.

    The defaults of torch's store (5 min) and of NCCL (10 min) are less than reading the libraries from a busy network
    file system may take.
    """
    return timedelta(seconds=min(max(limits.startup_s, limits.hang_s) + _LATER_S, _LONGEST_S))


def join(rank: int, world_size: int, device: torch.device, timeout: timedelta) -> None:
    """Form the process group at the address in the environment.

    Rank 0 listens on the socket that its supervisor opened, if any, so that no other process can take the port. With a
    GPU, tensors on the host still go over gloo.
    """
    listener = os.environ.get(LISTENER)
    store = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0,
        master_listen_fd=int(listener) if listener else None,
        timeout=timeout,
        wait_for_workers=False,
    )
    for default in ("default_pg_timeout", "default_pg_nccl_timeout"):
        # For the groups that engines make later.
        setattr(c10d, default, timeout)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
