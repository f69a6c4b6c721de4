"""Who runs when, and one run of a side."""

import os
import random
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from bench import store
from bench.comparison.sides import ComparedSide
from bench.errors import UserError
from bench.record import RunRecord
from bench.runtime.process import set_parent_death_signal


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


def run_rounds(
    sides: Sequence[ComparedSide],
    turns: Sequence[tuple[int, int]],
    words: Sequence[str],
    results: Path,
    follow: Callable[[int, ComparedSide, RunRecord], None],
) -> bool:
    """Let the sides run in these turns, each as repeat n of round n, and return whether all of them ended well; `words`
    are what `zeroscale run` takes.

    After a round in which one failed there is no other: it would fail again. Raises UserError where a side cannot run
    at all, or runs other code than its own.
    """
    failed = None
    for number, index in turns:
        if failed is not None and number > failed:
            return False
        side = sides[index]
        record = run_side(side, number, words, results)
        _check_code(side, record)
        follow(number, side, record)
        if record.outcome.kind != "ok":
            failed = number
    return failed is None


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
