"""What the ranks really talk over: a short all-reduce before the window."""

import os
import statistics
import time

import torch
import torch.distributed as dist

from bench.record import Link

_PAYLOAD_BYTES = {"cpu": 4 * 2**20, "cuda": 64 * 2**20}
_REPEATS = 5


def probe(device: torch.device) -> Link:
    """All-reduce a few times and return the bus bandwidth, 2 (n - 1) / n × payload ÷ median time.

    Source of the factor: nccl-tests, doc/PERFORMANCE.md.
    """
    size, world = _PAYLOAD_BYTES[device.type], dist.get_world_size()
    interfaces = os.environ.get("NCCL_SOCKET_IFNAME" if device.type == "cuda" else "GLOO_SOCKET_IFNAME")
    link = Link(
        backend="nccl" if device.type == "cuda" else "gloo",
        interfaces=tuple(interfaces.split(",")) if interfaces else (),
        payload_bytes=size,
        bus_bytes_per_s=None,
    )
    if world == 1:
        return link
    tensor = torch.ones(size // 4, device=device)
    seconds = []
    for _ in range(_REPEATS + 1):
        dist.barrier()
        begin = time.perf_counter()
        dist.all_reduce(tensor)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
        tensor.fill_(1.0)
    seconds.pop(0)  # opens the connections
    return link.model_copy(update={"bus_bytes_per_s": 2 * (world - 1) / world * size / statistics.median(seconds)})
