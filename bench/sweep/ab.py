"""Compare two revisions or two environments by measuring them alternately on one machine, so that a drift of the
machine affects both.

A side of the comparison is a Python interpreter with the code that it runs. In each round, each side runs once.
"""

import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bench.core import store
from bench.core.errors import UserError, suggest_nearest
from bench.core.quantities import was_busy
from bench.core.record import RunRecord
from bench.runtime.process import start_child

MOST_AGAIN = 2
"""A round measured on a busy machine is repeated at most this many times. Then it is kept, so that a machine that is
always busy gives a result, too."""
AGAIN = "measured-again"
"""Name of the results' subfolder for the earlier runs of rounds that were repeated."""
SET_ASIDE = "busy-"
"""Beginning of the names of the files in this subfolder by which a run is found. They differ from the usual names, so
that a table or report of the results does not include these runs."""


class ComparedSide(NamedTuple):
    """One side of a comparison: a Python interpreter and the code that it runs.

    The folder `code` comes first on the import path of the interpreter `python`. If `code` is None, the interpreter
    runs the zeroscale that is installed for it.
    """

    name: str  # name of the study folder of its results
    called: str  # description in messages
    python: Path
    code: Path | None
    commit: str | None  # commit of the code; None if unknown
    environment: bool = False  # the user named an interpreter, to compare versions of its packages


def find_checkout(folder: Path) -> Path | None:
    """Return the folder of the zeroscale checkout that contains `folder`; None if there is none."""
    return next((place for place in (folder, *folder.parents) if (place / "bench" / "cli").is_dir()), None)


@contextlib.contextmanager
def open_sides(first: str, second: str, checkout: Path | None) -> Iterator[tuple[ComparedSide, ComparedSide]]:
    """Yield the two sides of a comparison. `first` and `second` each name a git revision or a Python environment. A
    revision is checked out from the repository `checkout` when the context opens, and removed when it closes. Raise
    UserError for a name that is neither a revision nor an environment."""
    with contextlib.ExitStack() as stack:
        known = [(letter, named, _resolve_name(named, checkout)) for letter, named in (("a", first), ("b", second))]
        a, b = (stack.enter_context(_open_side(*one, checkout)) for one in known)
        yield a, b


def _resolve_name(named: str, checkout: Path | None) -> Path | str:
    """Return the meaning of `named`, the user's name for a side of the comparison: the folder of a checkout, the path
    of an interpreter, or the hash of a commit (as str). `checkout` is the zeroscale checkout in which commits are
    searched; None if the command does not run in a checkout."""
    path = Path(named).absolute()
    if (path / "bin" / "python").exists():
        return path / "bin" / "python"  # the link is not resolved: Python finds its environment by the link's path
    if path.is_file() and os.access(path, os.X_OK):
        return path
    code = find_checkout(path.resolve())
    if code and (named == "." or code == path.resolve()):  # `named` may be a branch that is also the name of a folder
        return code
    if checkout is None:
        rule = "is not a Python environment, and this folder is not a checkout of zeroscale"
        raise UserError(named, rule, "run the command in a checkout")
    commit = _ask_git(checkout, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{named}^{{commit}}")
    if commit is None:
        known = _ask_git(checkout, "for-each-ref", "--format=%(refname:short)", "refs/heads", "refs/tags") or ""
        rule = "neither a git revision nor a Python environment"
        raise UserError(named, rule, suggest_nearest(named, ["HEAD", *known.split()]))
    return commit


@contextlib.contextmanager
def _open_side(letter: str, named: str, meaning: Path | str, checkout: Path | None) -> Iterator[ComparedSide]:
    python = Path(sys.executable)
    if isinstance(meaning, str):
        assert checkout is not None  # which has this commit
        called = f"{named} ({_ask_git(checkout, 'log', '-1', '--format=%h %s', meaning)})"
        with _open_worktree(checkout, meaning) as code:
            yield ComparedSide(f"{letter}-{meaning[:7]}", called, python, code, meaning)
    elif meaning.is_dir():
        commit = _ask_git(meaning, "rev-parse", "HEAD")
        yield ComparedSide(f"{letter}-as-it-is", f"{meaning} with its uncommitted changes", python, meaning, commit)
    else:
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", meaning.parent.parent.name)[-40:]
        commit = _ask_git(checkout, "rev-parse", "HEAD") if checkout else None
        yield ComparedSide(f"{letter}-{name}", str(meaning), meaning, checkout, commit, environment=True)


@contextlib.contextmanager
def _open_worktree(checkout: Path, commit: str) -> Iterator[Path]:
    """Check a commit out into a temporary worktree and yield its folder. The worktree is removed at the end."""
    with tempfile.TemporaryDirectory(prefix="zeroscale-ab-") as folder:
        code = Path(folder, commit[:7])
        try:
            # Git hooks are disabled, because hooks of the user's repository may run any code.
            hookless = ("-c", "core.hooksPath=/dev/null")
            if _ask_git(checkout, *hookless, "worktree", "add", "--detach", str(code), commit) is None:
                rule = "cannot be checked out"
                raise UserError(commit[:7], rule, "check that `git worktree add` works in this repository")
            yield code
        finally:
            _ask_git(checkout, "worktree", "remove", "--force", "--force", str(code))


def _ask_git(checkout: Path, *question: str) -> str | None:
    """Return the output of a git command; None if the command fails."""
    command = ["git", "-C", str(checkout), *question]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, start_new_session=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def order_runs(rounds: int, seed: int) -> list[tuple[int, int]]:
    """Return a pair (round, side) for every run, in the order in which the runs start. A side is one of the two
    revisions or environments compared: 0 for the first, 1 for the second. In each round both sides run once, and the
    side that runs first alternates from round to round.

    Because of this alternation, a steady drift of the machine affects both sides almost equally. `seed` determines
    which side runs first in the first round.
    """
    first = random.Random(seed).randrange(2)
    return [(number, side) for number in range(rounds) for side in ((first + number) % 2, (first + number + 1) % 2)]


def looks(rounds: int, most: int) -> list[int]:
    """Return the numbers of rounds after which the results are tested. In a round, both sides of the comparison run
    once. The first number is `rounds`. Each further number is twice the previous number, but at most `most`. Example:
    `looks(5, 30)` returns [5, 10, 20, 30].

    The probability of a false result is fixed for all tests together. The more tests there are, the stricter each test
    must be. So there are only few tests.
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
) -> tuple[bool, list[int]]:
    """Run the two sides (revisions or environments) in the order of `turns`, a list of pairs (round, index of a side).
    Return two values. The first is True if all runs ended `ok`. The second has the indices of the rounds that were kept
    although the machine was busy. `words` are arguments of `zeroscale run`. After each run, `follow` is called with the
    round's index, the side and the record.

    If the machine was busy in a round, both sides run again, at most `MOST_AGAIN` times. The runs of the busy round are
    then moved to the folder `AGAIN`. A round with a failed run is the last round, because later runs would fail, too.
    Raise UserError if a side cannot run, or if a run imported code that is not from the revision of its side.
    """
    busy: list[int] = []
    for number, group in itertools.groupby(turns, key=lambda turn: turn[0]):
        order = [sides[index] for _, index in group]
        for again in range(MOST_AGAIN + 1):
            records = []
            for side in order:
                records.append(run_side(side, number, words, results))
                _check_code(side, records[-1])
                follow(number, side, records[-1])
            if any(record.outcome.kind != "ok" for record in records):
                return False, busy
            if not any(map(was_busy, records)):
                break
            if again == MOST_AGAIN:
                busy.append(number)
            else:
                _set_aside(results, order, number, again)
    return True, busy


def _set_aside(results: Path, sides: Sequence[ComparedSide], number: int, again: int) -> None:
    """Move the runs of a round (one run of each side of the comparison) out of the results, because the round is
    repeated. The new runs can then have the same repeat number, `number`. Files by which a run is found are renamed.
    `again` is the number of earlier repetitions of this round; it is also the name of the subfolder to which the runs
    are moved."""
    for side in sides:
        for folder in results.glob(f"{side.name}/*/{number}.*"):
            kept = results / AGAIN / str(again) / folder.relative_to(results)
            kept.parent.mkdir(parents=True, exist_ok=True)
            folder.rename(kept)
            for name in (store.RECORD, store.CIRCUMSTANCE):
                with contextlib.suppress(FileNotFoundError):  # a run may have left no record
                    (kept / name).rename(kept / f"{SET_ASIDE}{name}")


def run_side(side: ComparedSide, number: int, words: Sequence[str], results: Path) -> RunRecord:
    """Run one side once, in the round `number`, and return its record. On Ctrl-C, the run ends and still writes a
    record, and KeyboardInterrupt is raised."""
    command = [str(side.python), "-m", "bench.cli", "run", *words, "--results", str(results), "--study", side.name]
    process = start_child(
        command,
        env=_build_environment(side),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        _, said = process.communicate()
    except KeyboardInterrupt:
        process.send_signal(signal.SIGINT)
        process.communicate()
        raise
    found = sorted(results.glob(f"{side.name}/*/{number}.*/{store.RECORD}"))
    if not found:
        last = (said.strip().splitlines() or ["the process printed no message"])[-1].removeprefix("zeroscale: ")
        raise UserError(side.called, f"left no record: {last}")
    return store.read_record(found[-1])


def _build_environment(side: ComparedSide) -> dict[str, str]:
    """Return the environment variables for the process of a side (one of the two revisions or environments compared).
    With these variables, Python searches for modules first in the side's code, and never in the working folder."""
    path = [str(side.code)] if side.code else []
    path += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    return dict(os.environ) | {"PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path)}


def _check_code(side: ComparedSide, record: RunRecord) -> None:
    """Raise UserError if a run imported code that is not from the commit of its side (one of the two compared
    revisions). `record` is the record of the run."""
    if side.commit is None or record.environment is None:
        return
    ran = (record.environment.git or {}).get("commit")
    if ran != side.commit:
        rule = f"ran the code of {ran or 'an unknown commit'} instead of {side.commit}"
        raise UserError(side.called, rule, "remove the other installation of zeroscale from the path of this Python")
