"""How the ranks of a process group find each other."""

import os
from typing import TYPE_CHECKING

from bench.measure.channel import LISTENER

if TYPE_CHECKING:
    import torch


def join(rank: int, world_size: int, device: "torch.device") -> None:
    """Form the process group at the address in the environment. Rank 0 listens on the socket that was opened for it, if
    any, so that no port can be taken in between. With a GPU, tensors of the host still go over gloo."""
    import torch.distributed as dist
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = os.environ.get(LISTENER)
    meeting_point = TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=rank == 0,
        master_listen_fd=int(listener) if listener else None,
        wait_for_workers=False,
    )
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=meeting_point, rank=rank, world_size=world_size)
