"""What a prediction costs: milliseconds per point, of memory and of time, over a sweep of points that all differ.

python -m tests.benchmarks.prediction [--rounds 5]
"""

import argparse
import statistics
import time
from collections.abc import Callable

from bench.config import compose
from bench.predict.memory import predict_memory
from bench.predict.step_time import predict_step_time
from bench.spec import RunSpec
from bench.study import Study

AXES = {
    "model": ["mt5_small", "mt5_base", "mt5_large", "mt5_xl", "mt5_xxl"],
    "engine": ["ddp", "zero0", "zero1", "zero2", "zero3"],
    "batch.micro": [1, 2, 4, 8],
    "devices_per_node": [1, 2, 4, 8],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    points = compose.compose_points(Study(name="prediction", axes=AXES), [("machine", ["h200"])]).points
    specs, machine = [point.composed.spec for point in points], points[0].composed.machine
    _tell("memory", predict_memory, specs, rounds)
    _tell("step time", lambda spec: predict_step_time(spec, machine), specs, rounds)


def _tell(what: str, predict: Callable[[RunSpec], object], specs: list[RunSpec], rounds: int) -> None:
    milliseconds = []
    for _ in range(rounds):
        begin = time.process_time()
        for spec in specs:
            predict(spec)
        milliseconds.append((time.process_time() - begin) * 1000 / len(specs))
    print(
        f"{what} of a point, {len(specs)} points: {statistics.median(milliseconds):.3f} ms of processor time "
        f"(slowest of {rounds}: {max(milliseconds):.3f})"
    )


if __name__ == "__main__":
    main()
