"""What the rules of the window hold: how often a biased run is flagged, a good one is not, and an interval covers.

python -m tests.benchmarks.windows [--runs 100]

Runs are simulated step by step through the real rules (`bench.measure.window`), a block at a time, by the protocol of
conf/measure/full.yaml: their noise is one of NOISES, their level one of CHANGES. A run is biased where the mean of its
window is more than 2 % off the level that the machine keeps in the end; it is flagged if it is `unsteady` or `short`,
and noted if its interval is `wide` or of `few` steps. What begins after the end of a window no rule can see: such runs
stand in a column of their own.

With --runs 100: of the 1,755 runs that are biased, and whose change had begun, 91.3 % carry a flag and 96.6 % a flag or
a note; the rest heat slowly under noise of 5 % and more. Of the 2,331 good ones 4.8 % carry a flag: none to 3 % where
steps take up to 1 s and scatter by up to 5 %, 7 to 10 % where they scatter more or are few, and 17 to 31 % where 60
steps resemble each other, which are nearly all noted too. 29 % have a note. The median's interval covers 92 % of the
times that there is one, and 71 to 94 % where neighbours resemble each other by 0.9.

A change is looked for with more suspicion in a window that is wide or of few steps (1 in 100 at one place instead of 1
in 500): no stop rule has looked at its end for a hint of one. With the stricter level everywhere 85 % of the biased
carry a flag, and 2.2 % of the good ones; with the other everywhere 92 and 6.5 %.

The interval of the mean, and so of the rate, covers 84 to 99 %, but for slow steps so rare that most windows have none:
15 to 81 % (--runs 40).
"""

import argparse
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from analysis.stats.series import FEW, mean_interval
from bench.measure.window import find_stop_reason, is_steady, is_warmup_done, warmup_s
from bench.spec import MeasureSpec
from bench.statistics import SURE, SUSPECTED, effective_size, is_changing, series_interval, signs
from tests.analysis.stats.simulated import ar1

BIAS = 0.02
STEPS_S = (0.05, 0.2, 1.0, 5.0)
FULL = MeasureSpec()
Level = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""The level of each step over the one that is kept in the end, by its number and its time in s."""


class Noise(NamedTuple):
    coefficient: float  # of the step before
    deviation: float
    slow_part: float = 0.0  # of the steps, longer by …
    slower: float = 0.5  # … so many steps


NOISES = {
    "1 %": Noise(0, 0.01),
    "5 %": Noise(0, 0.05),
    "10 %": Noise(0, 0.1),
    "AR 0.5, 2 %": Noise(0.5, 0.02),
    "AR 0.9, 1 %": Noise(0.9, 0.01),
    "5 % slow steps": Noise(0, 0.01, 0.05),
    "0.5 % of steps × 10": Noise(0, 0.01, 0.005, 9.0),
}


def heats(by: float, tau_s: float = 40.0) -> Level:
    return lambda number, at: (1 + by * (1 - np.exp(-at / tau_s))) / (1 + by)


def decays(by: float, tau: float) -> Level:
    return lambda number, at: 1 + by * np.exp(-number / tau)


def jumps(by: float, place: int) -> Level:
    return lambda number, at: np.where(number < place, 1 - by, 1.0)


CHANGES: dict[str, Level] = {
    "slows by 6 % as it heats, 40 s": heats(0.06),
    "slows by 10 % as it heats, 40 s": heats(0.10),
    "+50 %, gone in 10 steps": decays(0.5, 10),
    "+50 %, gone in 30 steps": decays(0.5, 30),
    "+50 %, gone in 100 steps": decays(0.5, 100),
    "+20 %, gone in 100 steps": decays(0.2, 100),
    "10 % faster from step 25": jumps(-0.1, 25),
    "10 % faster from step 60": jumps(-0.1, 60),
    "5 % slower from step 40": jumps(0.05, 40),
    "30 % faster from step 25": jumps(-0.3, 25),
}


class Simulated(NamedTuple):
    steps: int
    bias: float
    flagged: bool  # a doubt: unsteady or short
    noted: bool  # how sure it is: wide or few
    covered: bool | None  # the median that is kept in the end, where there is an interval
    mean_covered: bool | None  # the mean of its steps, and so the rate, where there is an interval
    seen: bool  # the level changed within warm-up or window, if at all


def simulate(rng: np.random.Generator, step_s: float, noise: Noise, level: Level | None, *, gpu: bool) -> Simulated:
    """Run one series through the rules."""
    protocol = FULL
    longest = 2 * protocol.warmup_max_steps + protocol.max_steps + math.ceil(2 * protocol.min_s / step_s)
    number = np.arange(longest)
    kept = np.ones(longest) if level is None else level(number, number * step_s)
    deviation = noise.deviation * ar1(noise.coefficient)(rng, 1, longest)[0]
    slow = 1 + noise.slower * (rng.random(longest) < noise.slow_part)
    series = (step_s * kept * (1 + deviation) * slow).tolist()
    cut, block = protocol.block_steps, protocol.block_steps
    while not is_warmup_done(series[:cut], protocol, warmup_s(protocol, gpu)):
        cut += block
    steady, end = is_steady(series[:cut], block), cut + block
    while not find_stop_reason(series[cut:end], sum(series[cut:end]), protocol):
        end += block
    window = np.array(series[cut:end])
    interval = series_interval(window)
    mean = step_s * (1 + noise.slower * noise.slow_part)
    of_mean = mean_interval(window)
    wide = interval is None or interval[1] - interval[0] > protocol.width * np.median(window)
    few = effective_size(signs(window)) < FEW
    unsteady = not steady or is_changing(window, protocol.width, SUSPECTED if wide or few else SURE)
    short = len(window) < FULL.min_steps or window.sum() < FULL.min_s
    return Simulated(
        steps=end - cut,
        bias=float(kept[cut:end].mean() - 1) if level else float(window.mean() / mean - 1),
        flagged=bool(unsteady or short),
        noted=bool(wide or few),
        covered=None if interval is None else interval[0] <= step_s <= interval[1],
        mean_covered=None if of_mean is None else of_mean.low <= mean <= of_mean.high,
        seen=level is None or abs(kept[end - 1] - 1) < BIAS or float(np.ptp(kept[cut:end])) > BIAS / 4,
    )


def good_runs(rng: np.random.Generator, runs: int) -> None:
    """Print what becomes of runs whose level stays."""
    titles = ("flagged", "noted", "covered", "shown", "rate")
    print(f"{'good runs':<20}{'step':>6}{'steps':>7}{''.join(f'{title:>9}' for title in titles)}")
    everything: list[Simulated] = []
    for name, noise in NOISES.items():
        for step_s in STEPS_S:
            found = [simulate(rng, step_s, noise, None, gpu=True) for _ in range(runs)]
            everything += found
            print(f"{name:<20}{step_s:>6}{told(found)}", flush=True)
    print(f"{'all':<26}{told(everything)}")


def told(found: list[Simulated]) -> str:
    covered = [one.covered for one in found if one.covered is not None]
    fine = [one for one in found if abs(one.bias) <= BIAS]
    parts = ([one.flagged for one in fine], [one.noted for one in fine], covered)
    steps = float(np.median([one.steps for one in found]))
    rates = [one.mean_covered for one in found if one.mean_covered is not None]
    return f"{steps:>7.0f}{''.join(map(share, parts))}{len(covered) / len(found):>9.1%}{share(rates)}"


def changing_runs(rng: np.random.Generator, runs: int) -> None:
    """Print what becomes of runs whose level changes."""
    print(f"\n{'runs that change':<34}{'':>6}{'biased':>9}{'flagged':>9}{'or noted':>9}{'unseen':>9}")
    everything: list[Simulated] = []
    for gpu in (True, False):
        for name, level in CHANGES.items():
            found = [
                simulate(rng, step_s, noise, level, gpu=gpu)
                for step_s in STEPS_S
                for noise in NOISES.values()
                for _ in range(max(1, runs // 10))
            ]
            off = [one for one in found if abs(one.bias) > BIAS]
            seen = [one for one in off if one.seen]
            everything += seen
            parts = ([one.flagged for one in seen], [one.flagged or one.noted for one in seen])
            unseen = (len(off) - len(seen)) / len(found)
            print(
                f"{name:<34}{'GPU' if gpu else 'CPU':>6}{len(off) / len(found):>9.1%}",
                f"{''.join(map(share, parts))}{unseen:>9.1%}",
                flush=True,
            )
    parts = ([one.flagged for one in everything], [one.flagged or one.noted for one in everything])
    print(f"{'all that are biased':<49}{''.join(map(share, parts))}")


def share(found: list[bool]) -> str:
    return f"{np.mean(found):>9.1%}" if found else f"{'':>9}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=100)
    runs = parser.parse_args().runs
    good_runs(np.random.default_rng(0), runs)
    changing_runs(np.random.default_rng(1), runs)


if __name__ == "__main__":
    main()
