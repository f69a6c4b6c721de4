"""How the ranks of a process group find each other, and whether all were started in one allocation: a run that was not
measures nodes that it was not given.
"""

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from bench.core.record import Limits
from bench.core.scheduling import JobContext, find_foreign
from bench.measure.channel import LISTENER
from bench.measure.failures import Refused

if TYPE_CHECKING:
    import torch


class RankPlace(NamedTuple):
    """Where a rank was started: its host, and the job and the start of it that it is part of there."""

    host: str
    job_id: str  # empty: of no job
    restart: int = 0

    @classmethod
    def of(cls, host: str, context: JobContext) -> "RankPlace":
        return cls(host, context.job_id, context.restart)


def check_places(places: Sequence[RankPlace], nodelist: str) -> None:
    """Raise Refused where a rank is of another job, or another start of it, than rank 0, or on a host that is not on
    the list of nodes of rank 0's job."""
    first, *others = places
    for place in others:
        if place[1:] != first[1:]:
            reason = f"{place.host} is of job {_format_place(place)}, and the first node {first.host} of "
            raise Refused(reason + _format_place(first))
    if strangers := find_foreign(tuple(dict.fromkeys(place.host for place in places)), nodelist):
        raise Refused(f"{', '.join(strangers)} is not of this job's allocation, which has {nodelist}")


def _format_place(place: RankPlace) -> str:
    return f"{place.job_id or None}" + (f", restart {place.restart}" if place.restart else "")


_LATER_S = 60.0
_LONGEST_S = 30 * 86400.0


def compute_timeout(limits: Limits) -> timedelta:
    """Return how long torch waits for another rank: longer than the supervisor, which ends a run that stands still and
    says why. By default torch's store waits 5 min and NCCL 10, which reading the libraries from a busy network file
    system may take."""
    return timedelta(seconds=min(max(limits.startup_s, limits.hang_s) + _LATER_S, _LONGEST_S))


def join(rank: int, world_size: int, device: "torch.device", timeout: timedelta) -> None:
    """Form the process group at the address in the environment. Rank 0 listens on the socket that was opened for it, if
    any, so that no port can be taken in between. With a GPU, tensors of the host still go over gloo."""
    import torch.distributed as dist
    import torch.distributed.distributed_c10d as c10d
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = os.environ.get(LISTENER)
    meeting_point = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0,
        master_listen_fd=int(listener) if listener else None,
        timeout=timeout,
        wait_for_workers=False,
    )
    for default in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(c10d, default, timeout)  # of the groups that engines make later
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=meeting_point, rank=rank, world_size=world_size, timeout=timeout)
