"""How the ranks of a process group find each other."""

import os
from datetime import timedelta
from typing import TYPE_CHECKING

from bench.measure.channel import LISTENER
from bench.record import Limits

if TYPE_CHECKING:
    import torch

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
