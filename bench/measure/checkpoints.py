"""Checkpoints of a training in the folders of its attempts: `checkpoint-<steps>`, complete or absent.

They serve an attempt that resumes after another attempt of its repeat was lost, or a run that continues a stopped
training. Each attempt keeps its latest checkpoint; the attempt that ends the training removes all of them.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.core import store
from bench.core.record import Evaluation
from bench.core.spec import Frozen

_NAME = re.compile(r"checkpoint-(\d+)")
_PROGRESS = "progress.json"


class LearningProgress(Frozen):
    """Progress of a training up to a checkpoint, next to the engine's own files."""

    trained_s: float = 0.0  # of all optimizer steps, over all attempts
    evaluations: tuple[Evaluation, ...] = ()


class SavedTraining(NamedTuple):
    """A checkpoint to resume from."""

    folder: Path
    steps: int  # optimizer steps before it

    def read_progress(self) -> LearningProgress:
        """Return the progress at this checkpoint."""
        return store.read_value(self.folder / _PROGRESS, LearningProgress)


def find_latest(attempt: Path, goes_on_from: str | None = None) -> SavedTraining | None:
    """Return the furthest checkpoint of this attempt's repeat; None without a checkpoint.

    Checkpoints of the run whose config_id is `goes_on_from` count too.
    """
    found = (
        SavedTraining(path, int(match[1]))
        for path in _list_entries(attempt, goes_on_from)
        if (match := _NAME.fullmatch(path.name))
    )
    return max(found, key=lambda saved: saved.steps, default=None)


def find_unfinished(attempt: Path, steps: int) -> Path:
    """Return the folder in which a checkpoint is written until it is complete."""
    return attempt / f".checkpoint-{steps}"


def complete(attempt: Path, steps: int, progress: LearningProgress) -> int:
    """Rename a checkpoint that all ranks have written, and remove this attempt's earlier ones; return its bytes."""
    unfinished = find_unfinished(attempt, steps)
    store.write_json(unfinished / _PROGRESS, progress)
    # The rename is atomic: a checkpoint of this name is complete, whatever is killed when.
    whole = unfinished.rename(attempt / f"checkpoint-{steps}")
    for path in attempt.iterdir():
        if _NAME.fullmatch(path.name) and path != whole:
            shutil.rmtree(path)
    return count_bytes(whole)


def count_bytes(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def remove_all(attempt: Path, goes_on_from: str | None = None, *, but: Path | None = None) -> None:
    """Remove every checkpoint of this attempt's repeat and of the run that it continues, incomplete ones included.

    `but` is kept: another run may resume from it.
    """
    for path in _list_entries(attempt, goes_on_from):
        if _NAME.fullmatch(path.name.removeprefix(".")) and path != but:
            shutil.rmtree(path, ignore_errors=True)


def _list_entries(attempt: Path, goes_on_from: str | None) -> Iterator[Path]:
    """Yield the content of all attempts' folders of a repeat, in this run and in the run that it continues."""
    runs = [attempt.parent, *([attempt.parent.parent / goes_on_from] if goes_on_from else [])]
    repeat, _, _ = attempt.name.partition(".")
    for run in runs:
        for found in store.list_attempts(run):
            if str(found.repeat) == repeat:
                yield from list(found.folder.iterdir())
