"""Who runs when, and one run of a side."""

import itertools
import os
import random
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.core import store
from bench.core.errors import UserError
from bench.core.quantities import is_busy
from bench.core.record import RunRecord
from bench.runtime.process import set_parent_death_signal
from bench.sweep.ab.sides import ComparedSide

MOST_AGAIN = 2
"""How often a round on a busy machine is measured again. After that it is kept, so that a runner whose machine is
always shared has an answer."""
AGAIN = "measured-again"
"""Folder of the runs that were measured again, in that of the results."""


def order_runs(rounds: int, seed: int) -> list[tuple[int, int]]:
    """Return the round and side of every run: both sides in every round, by turns first (ABBA …), so that a steady
    drift of the machine adds as much to the one as to the other; `seed` decides who begins."""
    first = random.Random(seed).randrange(2)
    return [(number, side) for number in range(rounds) for side in ((first + number) % 2, (first + number + 1) % 2)]


def looks(rounds: int, most: int) -> list[int]:
    """Return after how many rounds the runs are judged: the first of them, then each time twice as many, and the most.

    They are few, for each look costs some of the probability of being wrong that all of them share.
    """
    found = [rounds]
    while found[-1] < most:
        found.append(min(2 * found[-1], most))
    return found


class RoundsResult(NamedTuple):
    """How rounds ended: whether all runs ended well, and the rounds that are kept though the machine was busy."""

    well: bool
    busy: tuple[int, ...] = ()


def run_rounds(
    sides: Sequence[ComparedSide],
    turns: Sequence[tuple[int, int]],
    words: Sequence[str],
    results: Path,
    follow: Callable[[int, ComparedSide, RunRecord], None],
) -> RoundsResult:
    """Run the sides in these turns, each as repeat n of round n; `words` are what `zeroscale run` takes.

    A round on a busy machine is measured again, both sides of it, twice at most; the runs that it had are kept beside
    the results, in `measured-again`. After a round in which a run failed there is no other: it would fail again. Raises
    UserError where a side cannot run at all, or runs other code than its own.
    """
    busy: list[int] = []
    for number, group in itertools.groupby(turns, key=lambda turn: turn[0]):
        order = [sides[index] for _, index in group]
        for again in range(MOST_AGAIN + 1):
            records = [_run_and_follow(side, number, words, results, follow) for side in order]
            if any(record.outcome.kind != "ok" for record in records):
                return RoundsResult(False, tuple(busy))
            if not any(map(_was_busy, records)):
                break
            if again == MOST_AGAIN:
                busy.append(number)
            else:
                _set_aside(results, order, number, again)
    return RoundsResult(True, tuple(busy))


def _run_and_follow(
    side: ComparedSide,
    number: int,
    words: Sequence[str],
    results: Path,
    follow: Callable[[int, ComparedSide, RunRecord], None],
) -> RunRecord:
    record = run_side(side, number, words, results)
    _check_code(side, record)
    follow(number, side, record)
    return record


def _was_busy(record: RunRecord) -> bool:
    observed = record.observations
    return observed is not None and observed.steps is not None and is_busy(observed, observed.steps.window_s)


def _set_aside(results: Path, sides: Sequence[ComparedSide], number: int, again: int) -> None:
    """Move the runs of a round out of the results, so that the next ones are repeat `number` again."""
    for side in sides:
        for folder in results.glob(f"{side.name}/*/{number}.*"):
            kept = results / AGAIN / str(again) / folder.relative_to(results)
            kept.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(kept)


def run_side(side: ComparedSide, number: int, words: Sequence[str], results: Path) -> RunRecord:
    """Run one side once and return its record. A Ctrl-C ends the run in good order and is raised again."""
    command = [str(side.python), "-m", "bench.cli", "run", *words, "--results", str(results), "--study", side.name]
    process = subprocess.Popen(
        command,
        env=_build_environment(side),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,  # a terminal's Ctrl-C comes here alone, and once
        preexec_fn=lambda: set_parent_death_signal(signal.SIGTERM),
    )
    try:
        _, said = process.communicate()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.communicate()
        raise
    found = sorted(results.glob(f"{side.name}/*/{number}.*/{store.RECORD}"))
    if not found:
        last = (said.strip().splitlines() or ["it said nothing"])[-1].removeprefix("zeroscale: ")
        raise UserError(side.called, f"left no record: {last}")
    return store.read_record(found[-1])


def _build_environment(side: ComparedSide) -> dict[str, str]:
    """Return variables by which the side's code is found before any other, also before what is in this folder."""
    path = [str(side.code)] if side.code else []
    path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return dict(os.environ) | {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path)}


def _check_code(side: ComparedSide, record: RunRecord) -> None:
    """Raise UserError where the record says that other code ran."""
    if side.commit is None or record.environment is None:
        return
    ran = (record.environment.git or {}).get("commit")
    if ran != side.commit:
        rule = f"ran the code of {ran or 'no known commit'} instead of {side.commit}"
        raise UserError(side.called, rule, "look for another zeroscale on its Python's path")
