"""Communication of the harness between the ranks of a run: the process group, common decisions, and the gathering of
results.

The harness calls its collectives only outside of timed steps. They are separate from the collectives of the engine. In
a rehearsal one rank runs alone and has no real peers.
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
from bench.core.scheduling import find_foreign
from bench.measure.channel import LISTENER
from bench.measure.failures import Refused

T = TypeVar("T")


class Peers:
    """Interface to all ranks of a run. This base class is for a rehearsal, which has one rank and no real peers."""

    are_real = False
    """True if all ranks of the process group exist. It is false in a rehearsal, which runs one rank alone. Losses of a
    rehearsal have no meaning."""

    @property
    def is_main(self) -> bool:
        """True on rank 0, which writes the files of the run; True also in a rehearsal."""
        return True

    def barrier(self) -> None:
        """Wait until all ranks have called this method."""

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks on the main rank, and an empty list on the other ranks."""
        return [value]

    def all_gather(self, rows: torch.Tensor) -> list[torch.Tensor]:
        """Exchange each rank's rows (steps, columns) with all ranks. Return a list with one tensor (ranks, columns) per
        step."""
        return list(rows.unsqueeze(1))

    def broadcast(self, decision: T) -> T:
        """Return rank 0's decision on every rank.

        Without a common decision, ranks could wait for each other forever.
        """
        return decision


class ProcessGroupPeers(Peers):
    """Ranks of torch's default process group."""

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
    """Place of a rank: its host, the scheduler's job that started it, and the number of times that this job was
    restarted."""

    host: str
    job_id: str  # empty outside of a job
    restart: int = 0

    def describe_job(self) -> str:
        """Return the job id and restart count as text."""
        return f"{self.job_id or None}" + (f", restart {self.restart}" if self.restart else "")


def check_places(places: Sequence[RankPlace], nodelist: str) -> None:
    """Raise Refused unless all ranks run in the same allocation of a scheduler. `places` has the place of each rank.

    A rank is refused if its job differs from rank 0's job, or its restart count from that of rank 0. It is also
    refused if its host is not in `nodelist`, the allocation of rank 0.
    """
    first, *others = places
    for place in others:
        if place[1:] != first[1:]:
            of_first = f"the first node {first.host} of {first.describe_job()}"
            raise Refused(f"{place.host} is of job {place.describe_job()}, and {of_first}")
    if foreign := find_foreign(tuple(dict.fromkeys(place.host for place in places)), nodelist):
        raise Refused(f"{', '.join(foreign)} is not in this job's allocation, which has {nodelist}")


# Seconds by which torch's timeout is longer than the supervisor's limits. The supervisor then ends a hang before torch
# does, and the record contains the supervisor's reason.
_LATER_S = 60.0
_LONGEST_S = 30 * 86400.0


def compute_timeout(limits: Limits) -> timedelta:
    """Return the timeout after which torch gives up waiting for another rank.

    The timeout is longer than the supervisor's limits for a silent rank, so that the supervisor ends a hang first and
    records the reason. torch's default timeouts (5 min for the store, 10 min for NCCL) are not used, because reading
    the libraries from a busy network file system may take longer than that.
    """
    return timedelta(seconds=min(max(limits.startup_s, limits.hang_s) + _LATER_S, _LONGEST_S))


def join(rank: int, world_size: int, device: torch.device, timeout: timedelta) -> None:
    """Create the process group, using the address in MASTER_ADDR and MASTER_PORT.

    If the supervisor opened a socket for rank 0, rank 0 listens on this socket, so no other process can take the port.
    On a GPU, tensors on the host are still sent over gloo.
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
        # Default timeout of process groups that engines create later.
        setattr(c10d, default, timeout)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
