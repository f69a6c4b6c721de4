"""Cost of a memory prediction and of a step-time prediction: milliseconds per point, over a sweep of different points.

  python -m tests.benchmarks.prediction [--rounds 5] [--random 3000 [--seed 1]]

With --random, random specs of all kinds are predicted instead, and faults in the predictions are printed.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from bench.config import compose
from bench.core.spec import RunSpec
from bench.core.study import Study
from bench.predict.memory import predict_memory
from bench.predict.step_time import predict_step_time
from tests.bench.predict.random_questions import draw_questions, find_faults

AXES = {
    "model": ["mt5_small", "mt5_base", "mt5_large", "mt5_xl", "mt5_xxl"],
    "engine": ["ddp", "zero0", "zero1", "zero2", "zero3"],
    "batch.micro": [1, 2, 4, 8],
    "devices_per_node": [1, 2, 4, 8],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--random", type=int, default=0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.random:
        sys.exit(_ask_random(args.seed, args.random))
    rounds = args.rounds
    points = compose.compose_points(Study(name="prediction", axes=AXES), [("machine", ["h200"])]).points
    specs, machine = [point.composed.spec for point in points], points[0].composed.machine
    _tell("memory", predict_memory, specs, rounds)
    _tell("step time", lambda spec: predict_step_time(spec, machine), specs, rounds)


def _ask_random(seed: int, count: int) -> str | None:
    """Make predictions for `count` random specs, and print the faults in these predictions. Return the number of faults
    as text; None if there are no faults."""
    outcomes, faults, begin = Counter[tuple[str, str]](), 0, time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        for question in draw_questions(seed, count, Path(folder)):
            outcome, found = find_faults(question)
            outcomes[question.verb, outcome] += 1
            faults += len(found)
            for fault in found:
                print(fault, flush=True)
    counts = ", ".join(f"{verb} {outcome} {number}" for (verb, outcome), number in sorted(outcomes.items()))
    print(f"{count} questions, seed {seed}: {counts}; {time.process_time() - begin:.0f} s of processor time")
    return f"{faults} faults" if faults else None


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
