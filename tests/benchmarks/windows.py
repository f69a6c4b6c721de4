"""Check the intervals and verdicts of simulated runs. For each simulated process, print how often a run's interval
contains the true step time, and how often the verdict of a comparison is right.

  python -m tests.benchmarks.windows [--runs 100]

A process is a random generator of step times (`tests.benchmarks.processes`). The real measurement loop
(`bench.measure.loop.run`) measures these step times with the protocol of conf/measure/full.yaml. The loop runs as on a
GPU: with the warm-up of a GPU, and with one block of steps in flight. Elapsed time is the sum of the simulated step
times.

The true step time of a process is its long-run mean, because this mean determines how long a training takes. Some
processes are slow at the beginning and then settle at a constant speed. Their true step time is the step time after
they have settled.
"""

import argparse
import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from analysis.scaling import Pace, compare_paces
from analysis.stats import intervals
from analysis.stats.compare import verdicts
from analysis.stats.intervals import WIDE
from bench.core.spec import MeasureSpec
from bench.core.statistics import LEVEL
from bench.measure.loop import Series, run
from tests.benchmarks.processes import PROCESSES, Process

STEPS_S = (0.2, 1.0, 5.0)
VERDICT_STEP_S = 0.5
OFF = 0.02
RIVAL = 1.04
"""True mean step time of a process, divided by that of its rival configuration."""


class OneRank:
    """Stand-in for the communication between ranks in a run with a single rank."""

    are_real = True

    def broadcast(self, decision: Any) -> Any:
        return decision


class SteppedDevice:
    """Stand-in for `bench.measure.loop.Trainer` on a GPU, with step times from a simulated process.

    The step times of a block become known when the next block has been launched.
    """

    on_gpu, blocks_ahead = True, 1

    def __init__(self, step_s: Iterator[float]) -> None:
        self.peers, self._step_s = OneRank(), step_s
        self._under_way: list[list[float]] = []
        self._together = True

    @property
    def steps_under_way(self) -> int:
        return sum(map(len, self._under_way))

    def block(self, steps: int, series: Series) -> None:
        self._together = not self._under_way
        self._under_way.append(list(itertools.islice(self._step_s, steps)))
        while len(self._under_way) > self.blocks_ahead:
            self._gather(series)

    def finish(self, series: Series) -> None:
        while self._under_way:
            self._gather(series)

    def _gather(self, series: Series) -> None:
        rows = [torch.tensor([[second, 0.0, 1.0, 1.0]], dtype=torch.float64) for second in self._under_way.pop(0)]
        series.append(rows, [], together=self._together)


class SimulatedRun(NamedTuple):
    """Measured window (the timed steps) of a simulated run."""

    stopped: str
    step_s: tuple[float, ...]  # steps of the measured window

    @property
    def mean_s(self) -> float:
        return math.fsum(self.step_s) / len(self.step_s)


def simulate(process: Process, step_s: float, seed: tuple[int, ...]) -> SimulatedRun:
    """Run the real measurement loop on simulated step times, and return the measured window. `step_s` is the time of an
    undisturbed step in seconds."""
    series = Series(())
    steps = process.draw(np.random.default_rng(seed), step_s)
    run(cast(Any, SteppedDevice(steps)), MeasureSpec(), lambda: None, series)
    return SimulatedRun(series.stopped, tuple(series.step_s[series.warmup :]))


def describe_runs(process: Process, step_s: float, runs: int) -> str:
    """Return a table row for a process, from `runs` simulated runs, with values in per cent. The first values are the
    bias of the mean step time, the standard error of this bias, the coverage of the interval, and the share of runs
    with each quality flag.

    Two values describe wrong runs. A run is wrong if its mean is wrong by more than a limit. The values are the share
    of wrong runs among all runs, and the share of flagged runs among the wrong runs.
    """
    found = [
        simulate(process, step_s, (PROCESSES.index(process), int(1000 * step_s), number)) for number in range(runs)
    ]
    truth = process.slowdown * step_s
    off = np.array([one.mean_s / truth - 1 for one in found])
    known = [intervals.describe_window(one.step_s) for one in found]
    covered = [one.mean is not None and one.mean.low <= truth <= one.mean.high for one in known]
    wide = [
        one.mean is None or one.mean.high - one.mean.low > WIDE * run.mean_s
        for one, run in zip(known, found, strict=True)
    ]
    marked = [
        one.changed or is_wide or one.few or has_stall(run)
        for one, is_wide, run in zip(known, wide, found, strict=True)
    ]
    biased = np.abs(off) > OFF
    of_biased = f"{100 * np.mean(np.array(marked)[biased]):5.0f}" if biased.any() else "    –"
    return (
        f"{100 * off.mean():7.1f} ±{100 * off.std() / math.sqrt(runs):4.1f}{100 * np.mean(covered):9.0f}"
        f"{100 * np.mean(wide):6.0f}{100 * np.mean([one.changed for one in known]):9.0f}"
        f"{100 * np.mean([has_stall(one) for one in found]):6.0f}{100 * biased.mean():7.0f}{of_biased}"
    )


def has_stall(one: SimulatedRun) -> bool:
    """Return True if the run would get the quality flag `stall`. The excess of its longest 1 % of steps is their total
    time minus the time of equally many steps of median length. The flag is set if this excess is above 2 % of the
    window's length."""
    ordered = sorted(one.step_s)
    longest = ordered[-max(1, len(ordered) // 100) :]
    return sum(longest) - len(longest) * float(np.median(ordered)) > 0.02 * sum(ordered)


def describe_verdicts(process: Process, runs: int, draws: int = 200) -> str:
    """Return a table row for comparisons of two configurations. The step times of the first come from `process`, a
    random generator. The second, its rival, is truly 4 % faster.

    The row has the per cent of `draws` comparisons with the right verdict (slower) and with a wrong verdict (faster or
    equal), for five and for ten repeats per configuration. The repeats are drawn from `runs` simulated runs.
    """
    rng = np.random.default_rng(PROCESSES.index(process))
    means = [simulate(process, VERDICT_STEP_S, (PROCESSES.index(process), number)).mean_s for number in range(runs)]
    rival = process.slowdown * VERDICT_STEP_S / RIVAL
    line = ""
    for repeats in (5, 10):
        told = []
        for _ in range(draws):
            ours = Pace({f"a{k}": [float(mean)] for k, mean in enumerate(rng.choice(means, repeats))})
            theirs = Pace({f"b{k}": [float(rival * (1 + 0.003 * rng.standard_normal()))] for k in range(repeats)})
            told += verdicts([compare_paces(ours, theirs, LEVEL)], LEVEL)
        right, wrong = (
            np.mean([one in names for one in told]) for names in (("slower",), ("faster", "equal within 3 %"))
        )
        line += f"{100 * right:12.0f}{100 * wrong:7.0f}"
    return line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    runs = parser.parse_args().runs
    print(f"{runs} runs each, by {MeasureSpec().window_s:g} s; per cent")
    print(f"{'':<46}{'step':>5}{'bias':>9}{'covered':>12}{'wide':>6}{'unsteady':>9}{'stall':>6}{'> 2 %':>7} marked")
    for process, step_s in itertools.product(PROCESSES, STEPS_S):
        print(f"{process.name:<46}{step_s:>5}{describe_runs(process, step_s, runs)}", flush=True)
    print(f"\n{'beside a rival that is truly 4 % faster':<46}{'5: right':>12}{'wrong':>7}{'10: right':>12}{'wrong':>7}")
    for process in PROCESSES:
        print(f"{process.name:<46}{describe_verdicts(process, max(runs, 100))}", flush=True)


if __name__ == "__main__":
    main()
