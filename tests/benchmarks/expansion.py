"""Cost of planning a sweep of ten thousand points before any run starts: seconds to expand, decode, check and describe
the points.

  python -m tests.benchmarks.expansion [--rounds 3]

Each round is a new process without caches. The whole command `zeroscale sweep --dry-run` is timed too, on the same
study.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STUDY: dict[str, Any] = {
    "name": "ten_thousand",
    "axes": {
        "model": ["mt5_small", "mt5_base", "mt5_large", "mt5_xl", "mt5_xxl"],
        "engine": ["ddp", "zero0", "zero1", "zero2", "zero3"],
        "batch.micro": list(range(1, 11)),
        "devices_per_node": [1, 2, 4, 8],
        "seed": list(range(10)),
    },
    "exclude": ["engine.stage == 0 and precision == 'fp16'"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--study", help=argparse.SUPPRESS)  # only for the fresh process
    args = parser.parse_args()
    if args.study:
        print(json.dumps(parts(args.study)))
        return
    with tempfile.TemporaryDirectory() as folder:
        study = Path(folder, "study.yaml")
        study.write_text(json.dumps(STUDY))
        rounds = [fresh(study, Path(folder)) for _ in range(args.rounds)]
    for name in rounds[0]:
        values = [seconds[name] for seconds in rounds]
        print(f"{name:<52} {statistics.median(values):.2f} s (slowest of {args.rounds}: {max(values):.2f})")


def fresh(study: Path, folder: Path) -> dict[str, float]:
    """Return the seconds that an expansion and a whole dry run take, each in a new process. An expansion makes the list
    of all points from the study's file. Its seconds are divided into parts. The dry run is the command `zeroscale sweep
    --dry-run`."""
    own = [sys.executable, "-m", "tests.benchmarks.expansion", "--study", str(study)]
    seconds: dict[str, float] = json.loads(subprocess.run(own, check=True, capture_output=True, text=True).stdout)
    listing = [str(Path(sys.executable).with_name("zeroscale")), "sweep", f"study={study}", "--dry-run",
               "--results", str(folder / "runs")]  # fmt: skip
    begin = time.perf_counter()
    subprocess.run(listing, check=True, capture_output=True)
    return seconds | {"zeroscale sweep --dry-run": time.perf_counter() - begin}


def parts(path: str) -> dict[str, float]:
    """Expand a study in this process, and return the seconds of each part of the expansion. The first part composes the
    study's 25 combinations of model and engine."""
    from bench.cli import options
    from bench.config import compose
    from bench.core.study import expand_study

    study = compose.read_study(path)
    marks = [time.perf_counter()]
    for pairs in dict.fromkeys(pairs[:2] for pairs in expand_study(study, [])):
        compose.compose_request(pairs)
    marks.append(time.perf_counter())
    points = compose.compose_points(study, []).points
    marks.append(time.perf_counter())
    lines = [options.format_point(point.composed) for point in points]
    marks.append(time.perf_counter())
    composing, rest, describing = (end - begin for begin, end in itertools.pairwise(marks))
    return {
        "composing its 25 choices of groups": composing,
        f"expanding, decoding and checking {len(points):,} points": rest,
        f"describing them in {len(lines):,} lines": describing,
    }


if __name__ == "__main__":
    main()
