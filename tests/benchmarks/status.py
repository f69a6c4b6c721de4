"""Run time of `zeroscale status` for ten thousand runs, in seconds and as a multiple of the start-up time of Python.

  python -m tests.benchmarks.status [--rounds 5]

The records are copies of a recorded run, with as many steps as a long window has.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench import api
from bench.core.files import read_regular
from bench.core.store import find_records
from bench.sweep import definition

RUNS = 10_000
_STEPS = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as results:
        folder = fill(Path(results))
        command = [sys.executable, "-m", "bench.cli", "status", str(folder)]
        status = [seconds(command) for _ in range(rounds)]
    python = [seconds([sys.executable, "-c", "pass"]) for _ in range(rounds)]
    median_s = statistics.median(status)
    print(f"zeroscale status of {RUNS} runs: {median_s:.2f} s (slowest of {rounds}: {max(status):.2f})")
    print(f"that is {median_s / statistics.median(python):.0f} times Python's own start")


def fill(results: Path) -> Path:
    """Write a study of 10,000 points with one record per point, and return its folder."""
    engines = ["ddp", "zero0", "zero1", "zero2", "zero3"]
    axes = {"engine": engines, "seed": list(range(RUNS // 5)), "machine": "cpu"}
    sweep = api.plan(overrides=axes).sweep
    folder = results / sweep.study
    definition.write(folder, sweep)
    record = json.loads(read_regular(next(find_records([Path("tests/data/runs.zip/smoke")]))))
    record["circumstance"]["machine"]["name"] = sweep.points[0].machine
    for name, values in record["observations"]["steps"].items():
        if isinstance(values, list) and values:
            record["observations"]["steps"][name] = (values * _STEPS)[:_STEPS]
    text = json.dumps(record, indent=1)
    for point in sweep.points:
        run = folder / point.config_id / "0.0"
        run.mkdir(parents=True)
        (run / "record.json").write_text(text)
    return folder


def seconds(command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
