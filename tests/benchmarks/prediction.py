"""What a prediction of memory costs: milliseconds per point, over a sweep of points that all differ.

python -m tests.benchmarks.prediction [--rounds 5]
"""

import argparse
import statistics
import time

from bench import config
from bench.predict.memory import memory
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
    specs = [point.asked.spec for point in config.points(Study(name="prediction", axes=AXES), []).points]
    milliseconds = []
    for _ in range(rounds):
        begin = time.process_time()
        for spec in specs:
            memory(spec)
        milliseconds.append((time.process_time() - begin) * 1000 / len(specs))
    print(
        f"memory of a point, {len(specs)} points: {statistics.median(milliseconds):.3f} ms of processor time "
        f"(slowest of {rounds}: {max(milliseconds):.3f})"
    )


if __name__ == "__main__":
    main()
