"""Time saved by running all points in one Slurm job (packed), compared with one job and a cold start per point.

  python -m tests.benchmarks.packed [--points 24]      (as root, with slurm-wlm, munge and iproute2: slurm/testbed)

A point is one configuration to measure. Every point runs the same few steps on two nodes. The benchmark starts a Slurm
testbed: a small Slurm cluster on this machine, here with two nodes. So jobs run one after another.

First, half of the points run in one job each. Then all points run in the packed job. At the end, the other half of the
points run in one job each. With this order, drift of the machine affects both modes.

Wall time is measured from the call of `zeroscale sweep` to the end of the last job. Wall time minus the time of the
steps is the fixed cost of the points.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Self

from bench.core import store
from bench.sweep import jobs
from tests.slurm.slurm_testbed import Testbed

ENGINES = ("zero1", "zero2", "zero3")
POINT = (
    "model=tiny", "machine=cpu", "nodes=2", "devices_per_node=1", "precision=fp32", "batch.micro=1",
    "sequence.encoder=32", "sequence.decoder=16", "engine.reduce_bucket_size=1000000", "measure.warmup_steps=3",
    "measure.block_steps=3", "measure.min_steps=6",
    "launcher=slurm_testbed", "launcher.throttle=1", "launcher.job_max_min=600",
)  # fmt: skip
AT_ONCE = "SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1"
"""Slurm configuration with which jobs start at once. The benchmark measures cold starts, and time in the queue is not
part of a cold start."""


class Spent(NamedTuple):
    """Seconds that several points took together. The points were measured by one or more sweeps."""

    points: int
    wall_s: float
    allocated_s: float  # seconds within allocations, without waiting in the queue between them
    steps_s: float

    def and_(self, other: Self) -> "Spent":
        return Spent(*(one + more for one, more in zip(self, other, strict=True)))

    def told(self) -> str:
        return (
            f"{self.points} points in {self.wall_s:.1f} s, {self.allocated_s:.1f} s of it in allocations, "
            f"{self.steps_s:.1f} s of it steps: {self.fixed_s:.2f} s per point beside its steps"
        )

    @property
    def fixed_s(self) -> float:
        return (self.wall_s - self.steps_s) / self.points


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--points", type=int, default=24, help="a multiple of 6: three engines, two halves")
    points = parser.parse_args().points
    if points < 1 or points % (2 * len(ENGINES)):
        parser.error(f"--points {points}: must be a multiple of {2 * len(ENGINES)}")
    # Raises an exception, so that `finally` removes the testbed.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    seeds = range(points // len(ENGINES))
    first, second = seeds[: len(seeds) // 2], seeds[len(seeds) // 2 :]
    bed = Testbed("b")
    try:
        bed.up("--nodes", "2", "--rate", "1gbit", "--conf", AT_ONCE)
        sweep(bed, "point", [1000], ENGINES[:1])  # fills the page cache before the measurement
        print(f"load {os.getloadavg()[0]:.1f} before", flush=True)
        cold = sweep(bed, "point", first)
        packed = sweep(bed, "packed", seeds)
        cold = cold.and_(sweep(bed, "point", second))
    finally:
        bed("down")
    print(f"packed: {packed.told()}\ncold:   {cold.told()}")
    print(f"packed ÷ cold: fixed cost of a point {packed.fixed_s / cold.fixed_s:.3f}, ", end="")
    print(f"wall {packed.wall_s / cold.wall_s:.3f}; load {os.getloadavg()[0]:.1f} after")


def sweep(bed: Testbed, mode: str, seeds: Sequence[int], engines: Sequence[str] = ENGINES) -> Spent:
    """Measure every combination of engine and seed. With the mode `packed`, one job runs all combinations. With the
    mode `point`, each combination has a job of its own. Return the seconds that these points took."""
    with tempfile.TemporaryDirectory() as results:
        axes = (f"engine={','.join(engines)}", f"seed={','.join(map(str, seeds))}", f"launcher.mode={mode}")
        began_at = time.time()
        zeroscale(bed, "sweep", *POINT, *axes, "--results", results)
        zeroscale(bed, "status", f"{results}/adhoc", "--wait")
        return spent(Path(results, "adhoc"), began_at)


def zeroscale(bed: Testbed, *words: str) -> None:
    environment = os.environ | {"SLURM_CONF": str(bed.folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "bench.cli", *words], env=environment, stdout=subprocess.DEVNULL, check=True)


def spent(folder: Path, began_at: float) -> Spent:
    """Return the seconds that the points of a study took: the wall time from submission until the last job ended, the
    time in allocations, and the time in steps. `began_at` is the time of submission in seconds since the epoch. Every
    point must have ended `ok`."""
    records = [store.read_record(path) for path in folder.glob("*/*.*/record.json")]
    assert all(record.outcome.kind == "ok" for record in records), [record.outcome for record in records]
    series = [
        record.observations.steps.step_s for record in records if record.observations and record.observations.steps
    ]
    stretches = [stretch for job in jobs.list_submitted(folder)[0] for _, stretch in jobs.list_allocations(job.folder)]
    ends = [stretch.ended_at or time.time() for stretch in stretches]
    allocated_s = sum(end - stretch.began_at for end, stretch in zip(ends, stretches, strict=True))
    return Spent(len(records), max(ends) - began_at, allocated_s, sum(map(sum, series)))


if __name__ == "__main__":
    main()
