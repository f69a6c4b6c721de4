"""Entry point of one rank of a calibration, `python -m bench.calibrate.rank FOLDER`. Each node has a process that
starts the ranks of the node (bench.calibrate.starting)."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.calibrate import (
    DOING,
    FAILURE,
    MEASURED,
    REQUEST,
    CalibrationRequest,
    CalibrationResult,
    Part,
    collectives,
    rates,
)
from bench.core import store
from bench.core.machine import Calibration
from bench.core.record import Limits
from bench.measure.environment import classify, name_collectives, read_version
from bench.measure.failures import Refused

if TYPE_CHECKING:
    import torch


def main() -> None:
    """Run the calibration that is requested in the folder on the command line. Rank 0 writes the result into that
    folder."""
    folder, status = Path(sys.argv[1]), 0
    try:
        measure(folder)
    except BaseException as error:
        _write_failure(folder, error)
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # skips destroying process groups, which could wait for lost peers


def measure(folder: Path) -> None:
    """Run the measurements of a request. All ranks take part in the measurements of contention and collectives. Rank 0
    runs every other measurement alone, while the other ranks wait. `folder` has the request, and gets the result."""
    import torch
    import torch.distributed as dist

    from bench.measure import peers
    from bench.measure.environment import find_device

    request = CalibrationRequest.model_validate_json((folder / REQUEST).read_bytes())
    rank = int(os.environ["RANK"])
    device = find_device(request.machine.on(request.device), request.ranks_per_node, int(os.environ["LOCAL_RANK"]))
    peers.join(rank, request.world_size, device, peers.compute_timeout(Limits()))
    found: dict[Part, Any] = {}
    for part in request.parts:
        if rank == 0:
            store.write_atomically(folder / DOING, part.encode())
        if rank == 0 or part in ("contention", "collectives"):
            found[part] = _list_measurements(request, device)[part](request.seconds_for(part))
        dist.all_reduce(torch.zeros(1))  # a barrier over gloo, because a rank that waits in gloo uses no processor
    if rank == 0:
        store.write_json(folder / MEASURED, _build_result(request, found, device))


def _list_measurements(request: CalibrationRequest, device: "torch.device") -> dict[Part, Callable[[float], Any]]:
    """Return a measuring function for each part of a calibration. Its argument is the number of seconds for the part.
    Parts with a fixed amount of work, such as `attention`, ignore this argument."""
    nodes, ranks = request.nodes, request.ranks_per_node
    precisions = rates.list_precisions(request.machine, device)
    return {
        "matmul": lambda seconds: rates.measure_matmul(request.machine, request.products, device, seconds),
        "sustained": lambda seconds: rates.measure_sustained(precisions, device, seconds),
        "attention": lambda _: {precision: rates.measure_attention(precision, device) for precision in precisions},
        "memory": lambda _: rates.measure_memory(device),
        "launches": lambda _: rates.measure_launches(device),
        "host_link": lambda _: rates.measure_host_link(device),
        "contention": lambda seconds: collectives.measure_contention(request, device, seconds),
        "collectives": lambda seconds: collectives.measure_collectives(device, nodes, ranks, seconds),
    }


def _build_result(request: CalibrationRequest, found: dict[Part, Any], device: "torch.device") -> CalibrationResult:
    """Return the measured numbers with the circumstances of the measurement, such as device, ranks and versions."""
    import torch

    classification, unmeasured = classify(device.type, request.ranks_per_node), None
    if "matmul" in found:
        precisions = rates.list_precisions(request.machine, device)
        unmeasured = rates.describe_unmeasured(request.products, precisions, found["matmul"])
    made = {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "device": classification.device,
        "ranks": f"{request.nodes} × {request.ranks_per_node}",
        "threads": str(torch.get_num_threads()),  # threads of each rank; set by OMP_NUM_THREADS
        "parts": ", ".join(request.parts),
        "not_measured": unmeasured,
        "backend": name_collectives() if device.type == "cuda" else "gloo",
        "zeroscale": read_version("zeroscale"),
        **{name: classification.versions[name] for name in ("torch", "cuda", "nccl", "driver")},
    }
    return CalibrationResult(
        device_name=classification.device,
        calibration=Calibration(
            made={name: value for name, value in made.items() if value is not None},
            matmul=found.get("matmul", ()),
            attention_tflops=found.get("attention", {}),
            kernel_s=found.get("launches"),
            slowdown=found.get("contention", ()),
            collectives=found.get("collectives", ()),
        ),
        sustained_tflops=found.get("sustained", {}),
        memory_bytes_per_s=found.get("memory"),
        host_link_bytes_per_s=found.get("host_link"),
    )


def _write_failure(folder: Path, error: BaseException) -> None:
    """Write the reason of a failure to a file, unless another rank has already written its reason. If a rank fails, its
    peers fail later because they lost this rank. So the first reason is the cause."""
    why = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError), (folder / FAILURE).open("x") as file:
        file.write(" ".join(why.split()))


if __name__ == "__main__":
    main()
