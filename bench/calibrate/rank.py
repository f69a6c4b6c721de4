"""What every rank of a calibration runs: `python -m bench.calibrate.rank FOLDER`, started by its node."""

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
    """Measure what the folder named on the command line asks for; rank 0 writes what came out."""
    folder, status = Path(sys.argv[1]), 0
    try:
        measure(folder)
    except BaseException as error:
        _write_failure(folder, error)
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # taking down process groups could only wait for lost peers


def measure(folder: Path) -> None:
    """Take part in every measurement that needs all ranks; rank 0 alone makes the others while its peers wait."""
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
        dist.all_reduce(torch.zeros(1))  # over gloo, where waiting costs no processor
    if rank == 0:
        store.write_json(folder / MEASURED, _build_result(request, found, device))


def _list_measurements(request: CalibrationRequest, device: "torch.device") -> dict[Part, Callable[[float], Any]]:
    """Return how each part is measured within some seconds, as far as it has a use for them."""
    return {
        "matmul": lambda seconds: rates.measure_matmul(request.machine, request.products, device, seconds),
        "attention": lambda _: {
            precision: rates.measure_attention(precision, device)
            for precision in rates.list_precisions(request.machine, device)
        },
        "memory": lambda _: rates.measure_memory(device),
        "launches": lambda _: rates.measure_launches(device),
        "host_link": lambda _: rates.measure_host_link(device),
        "contention": lambda seconds: collectives.measure_contention(request, device, seconds),
        "collectives": lambda seconds: collectives.measure_collectives(
            device, request.nodes, request.ranks_per_node, seconds
        ),
    }


def _build_result(request: CalibrationRequest, found: dict[Part, Any], device: "torch.device") -> CalibrationResult:
    """Put together what was found, with what it holds for."""
    import torch

    classification = classify(device.type, request.ranks_per_node)
    made = {
        "date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "device": classification.device,
        "ranks": f"{request.nodes} × {request.ranks_per_node}",
        "threads": str(torch.get_num_threads()),  # of each rank; OMP_NUM_THREADS decides
        "parts": ", ".join(request.parts),
        "not_measured": rates.describe_unmeasured(
            request.products, rates.list_precisions(request.machine, device), found["matmul"]
        )
        if "matmul" in found
        else None,
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
        memory_bytes_per_s=found.get("memory"),
        host_link_bytes_per_s=found.get("host_link"),
    )


def _write_failure(folder: Path, error: BaseException) -> None:
    """Say why, unless another rank did: whoever loses a peer only fails after it."""
    why = str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError), (folder / FAILURE).open("x") as file:
        file.write(" ".join(why.split()))


if __name__ == "__main__":
    main()
