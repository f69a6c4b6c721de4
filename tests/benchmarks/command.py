"""Run time of the command line `zeroscale`, and the fixed cost of a run.

  python -m tests.benchmarks.command [--rounds 10]

Each time is printed in seconds, and as a multiple of the start-up time of Python in the same benchmark run.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

ZEROSCALE = (str(Path(sys.executable).with_name("zeroscale")),)
COMMANDS = {
    "python -c pass": (sys.executable, "-c", "pass"),
    "zeroscale --help": (*ZEROSCALE, "--help"),
    "zeroscale run --dry-run": (*ZEROSCALE, "run", "model=tiny", "engine=zero2", "--dry-run"),
    "zeroscale sweep study=smoke --dry-run": (*ZEROSCALE, "sweep", "study=smoke", "--dry-run"),
}
QUICK = ("model=tiny", "precision=fp32", "sequence.encoder=32", "sequence.decoder=16", "measure.warmup_steps=3",
         "measure.block_steps=3", "measure.min_steps=6", "measure.window_s=0")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    seconds: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(rounds):
        for name, command in COMMANDS.items():
            seconds[name].append(timed(command))
    python = statistics.median(seconds["python -c pass"])
    for name, values in seconds.items():
        middle = statistics.median(values)
        print(f"{name:<40} {middle:.3f} s (slowest of {rounds}: {max(values):.3f})  {middle / python:.1f} × python")
    for engine in ("ddp", "zero3"):
        print_fixed_cost(engine)


def timed(command: Sequence[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin


def print_fixed_cost(engine: str) -> None:
    """Run a tiny model with this engine. Print the seconds of each phase from the start of the run to its first step.
    These seconds are the fixed cost of a run."""
    with tempfile.TemporaryDirectory() as results:
        command = (*ZEROSCALE, "run", *QUICK, f"engine={engine}", "--results", results, "--json")
        begin = time.perf_counter()
        record = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        whole = time.perf_counter() - begin
    observed = record["observations"]
    parts = ", ".join(f"{name} {value:.2f}" for name, value in observed["phases_s"].items())
    steps = sum(observed["steps"]["step_s"])
    print(f"{engine}, 2 processes: {whole:.1f} s in all, {steps:.1f} s of it steps; to the first step: {parts}")


if __name__ == "__main__":
    main()
