"""Error rates of change detection in histories: the rate of false alarms, and the power to detect changes.

  python -m tests.benchmarks.histories [--histories 400]

A history is a series of step times at successive positions, for example one per commit. The printed tables call a
position a place. A step time deviates randomly from its true value, and the standard deviation is called the noise. The
size of a change is given in multiples of the noise. The noise distributions are those of `tests.benchmarks.verdicts`.
If a distribution is named `serial`, the deviations at neighbouring positions are correlated.
"""

import argparse
import itertools
from collections.abc import Iterable

import numpy as np

from analysis.stats.change_points import LevelChange, find_changes
from tests.benchmarks.verdicts import NOISES, format_shares, format_sizes, serial

Array = np.ndarray

LENGTHS = (10, 20, 50)
SERIES = (1, 10)
DRAWS = 499
SHAPES = ("middle", "last 2", "last 3", "last 5", "4 in the middle")
NAMES = ("normal", "t of 3 degrees", "30 % bad nodes", "two clock states", "5 % disturbed", "skewed")
SERIAL = {f"serial {part}": part for part in (0.3, 0.6)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--histories", type=int, default=400)
    count = parser.parse_args().histories
    for row in itertools.chain(alike(count), power(count), stairs(count)):
        print(row, flush=True)


def alike(count: int) -> Iterable[str]:
    """Yield the lines of a table of false-alarm rates. No simulated history has a true change. The table has the per
    cent of cases in which at least one change is reported. A case is one history alone, or ten histories that are
    tested together. Each number is from `count` cases of one history, or from `count` / 4 cases of ten histories."""
    yield f"\nhistories without a change: % of sets with one told\n{'':<20}{'series':>7}  {format_sizes(LENGTHS)}"
    for name, series in itertools.product([*NAMES, *SERIAL], SERIES):
        detected = [wrong(name, length, series, count if series == 1 else count // 4) for length in LENGTHS]
        yield f"{name:<20}{series:>7}  {format_shares(detected)}"


def wrong(name: str, length: int, series: int, count: int) -> float:
    rng = np.random.default_rng([*name.encode(), length, series])
    sets = (drawn(name, rng, (series, length)) for _ in range(count))
    return 100 * float(np.mean([any(find_changes(list(one), draws=DRAWS)) for one in sets]))


def drawn(name: str, rng: np.random.Generator, shape: tuple[int, int]) -> Array:
    return serial(rng, shape, SERIAL[name]) if name in SERIAL else NOISES[name](rng, shape)


def shaped(shape: str, length: int) -> Array:
    """Return a boolean mask of shape (length,): True at the positions where the level of a history is raised. `shape`
    describes these positions, for example `last 3`."""
    at = np.arange(length)
    if shape == "middle":
        return at >= length // 2
    if shape == "4 in the middle":
        return (at >= length // 2 - 2) & (at < length // 2 + 2)
    return at >= length - int(shape.split()[1])


def power(count: int) -> Iterable[str]:
    """Yield the lines of a table: the per cent of histories in which a change of 3 or 5 times the noise is detected.
    Each number is from `count` simulated histories.

    Two further rows concern only histories in which a change is detected. The first has the per cent of these histories
    in which number and positions of the changes are right. The second has the coverage of the interval for the size of
    the change.
    """
    yield "\none change, normal noise: % told; of these within the places told; interval covers"
    yield f"{'':<20}{'':>7}  {format_sizes(LENGTHS)}"
    for effect, shape in itertools.product((3, 5), SHAPES):
        cells = [found(effect, shape, length, count) for length in LENGTHS]
        for what, place in (("told", 0), ("right", 1), ("covers", 2)):
            name = f"{effect}, {shape}" if place == 0 else ""
            yield f"{name:<20}{what:>7}  {format_shares(one[place] for one in cells)}"


def found(effect: float, shape: str, length: int, count: int) -> tuple[float, float, float]:
    rng = np.random.default_rng([int(effect), length, *shape.encode()])
    there = shaped(shape, length)
    true = np.flatnonzero(np.diff(there.astype(int))) + 1
    detected, right, covers = [], [], []
    for _ in range(count):
        (changes,) = find_changes([0.01 * (rng.standard_normal(length) + effect * there)], draws=DRAWS)
        detected.append(bool(changes))
        if changes:
            right.append(_right(changes, true))
            covers += [one.interval.low <= np.expm1(_true_size(one, effect)) <= one.interval.high for one in changes]
    return tuple(100 * float(np.mean(one)) if one else float("nan") for one in (detected, right, covers))  # type: ignore


def _true_size(change: LevelChange, effect: float) -> float:
    return 0.01 * effect * (1 if change.size > 0 else -1)


def _right(changes: list[LevelChange], true: Array) -> bool:
    return len(changes) == true.size and all(
        one.within[0] < place <= one.within[1] for one, place in zip(changes, true, strict=True)
    )


def stairs(count: int) -> Iterable[str]:
    """Yield the lines of a table for `count` / 2 simulated histories of step times. In each history, the true step time
    changes five times. The table has two numbers, averaged over the histories: the number of true changes that are
    detected, and the number of false detections."""
    yield "\nfive changes of 5 noises in 60 places: told of them, and besides them"
    rng, detected, more = np.random.default_rng(0), [], []
    true = np.arange(10, 60, 10)
    for _ in range(count // 2):
        levels = np.cumsum(np.isin(np.arange(60), true) * rng.choice([-1, 1], 60)) * 5
        (changes,) = find_changes([0.01 * (rng.standard_normal(60) + levels)], draws=DRAWS)
        near = [int(np.abs(true - one.after).min()) <= 1 for one in changes]
        detected.append(sum(near))
        more.append(len(near) - sum(near))
    yield f"{np.mean(detected):7.2f}{np.mean(more):7.2f}"


if __name__ == "__main__":
    main()
