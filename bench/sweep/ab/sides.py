"""The two sides of an A/B measurement: which Python runs which code."""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.core.errors import UserError, suggest_nearest


class ComparedSide(NamedTuple):
    """What runs: `code` is put first on the path of `python`; None takes what is installed there."""

    name: str  # of its results' folder
    called: str  # for people
    python: Path
    code: Path | None
    commit: str | None  # that the code is of; None where no history says so
    environment: bool = False  # the Python was named, so its versions are the question


def find_checkout(folder: Path) -> Path | None:
    """Return the checkout of zeroscale that `folder` is in, or None."""
    return next((place for place in (folder, *folder.parents) if (place / "bench" / "cli").is_dir()), None)


@contextlib.contextmanager
def open_sides(first: str, second: str, checkout: Path | None) -> Iterator[tuple[ComparedSide, ComparedSide]]:
    """Give both sides; revisions are checked out for as long as that lasts. UserError for what names nothing."""
    with contextlib.ExitStack() as stack:
        known = [(letter, named, _resolve_name(named, checkout)) for letter, named in (("a", first), ("b", second))]
        a, b = (stack.enter_context(_open_side(*one, checkout)) for one in known)
        yield a, b


def _resolve_name(named: str, checkout: Path | None) -> Path | str:
    """Return the folder, interpreter or commit that `named` means."""
    path = Path(named).absolute()
    if (path / "bin" / "python").exists():
        return path / "bin" / "python"  # not resolved: an environment's Python is a link, and known by its place
    if path.is_file() and os.access(path, os.X_OK):
        return path
    code = find_checkout(path.resolve())
    if code and (named == "." or code == path.resolve()):  # another folder may have the name of a branch
        return code
    if checkout is None:
        raise UserError(named, "no Python environment, and no checkout of zeroscale here", "call it inside of one")
    commit = _ask_git(checkout, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{named}^{{commit}}")
    if commit is None:
        known = _ask_git(checkout, "for-each-ref", "--format=%(refname:short)", "refs/heads", "refs/tags") or ""
        raise UserError(
            named, "neither a git revision nor a Python environment", suggest_nearest(named, ["HEAD", *known.split()])
        )
    return commit


@contextlib.contextmanager
def _open_side(letter: str, named: str, meaning: Path | str, checkout: Path | None) -> Iterator[ComparedSide]:
    python = Path(sys.executable)
    if isinstance(meaning, str):
        assert checkout is not None  # a commit is of one
        name, called = (
            f"{letter}-{meaning[:7]}",
            f"{named} ({_ask_git(checkout, 'log', '-1', '--format=%h %s', meaning)})",
        )
        with _open_worktree(checkout, meaning) as code:
            yield ComparedSide(name, called, python, code, meaning)
    elif meaning.is_dir():
        commit = _ask_git(meaning, "rev-parse", "HEAD")
        yield ComparedSide(f"{letter}-as-it-is", f"{meaning} as it is", python, meaning, commit)
    else:
        name = re.sub(r"[^A-Za-z0-9_.-]+", "-", meaning.parent.parent.name)[-40:]
        commit = _ask_git(checkout, "rev-parse", "HEAD") if checkout else None
        yield ComparedSide(f"{letter}-{name}", str(meaning), meaning, checkout, commit, environment=True)


@contextlib.contextmanager
def _open_worktree(checkout: Path, commit: str) -> Iterator[Path]:
    """Check a commit out beside the checkout, which stays as it is, and remove that in the end."""
    with tempfile.TemporaryDirectory(prefix="zeroscale-ab-") as folder:
        code = Path(folder, commit[:7])
        try:
            # No hooks: those of the user's own work have no business here.
            done = _ask_git(
                checkout, "-c", "core.hooksPath=/dev/null", "worktree", "add", "--detach", str(code), commit
            )
            if done is None:
                raise UserError(commit[:7], "cannot be checked out", "does `git worktree add` work here?")
            yield code
        finally:
            _ask_git(checkout, "worktree", "remove", "--force", "--force", str(code))


def _ask_git(checkout: Path, *question: str) -> str | None:
    """Return what git says, or None where it refuses."""
    try:
        command = ["git", "-C", str(checkout), *question]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, start_new_session=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None
