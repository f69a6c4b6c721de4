"""Checkpoints of a training in the folders of its attempts: `checkpoint-<steps>`, whole or not there.

They are for the attempt that goes on where another one of its repeat was lost, or where a run of the same training was
to stop: each attempt keeps its latest, and the one that ends the training removes them all.
"""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

from bench.core import store
from bench.core.record import Evaluation
from bench.core.spec import Frozen

_NAME = re.compile(r"checkpoint-(\d+)")
_PROGRESS = "progress.json"


class LearningProgress(Frozen):
    """What a training has come to, beside what its engine saves."""

    trained_s: float = 0.0  # of all optimizer steps, over all attempts
    evaluations: tuple[Evaluation, ...] = ()


class SavedTraining(NamedTuple):
    """A checkpoint to go on from."""

    folder: Path
    steps: int  # optimizer steps before it


def find_latest(attempt: Path, goes_on_from: str | None = None) -> SavedTraining | None:
    """Return the furthest checkpoint of this attempt's repeat, that of the run with the config_id `goes_on_from`
    included; None where there is none."""
    found = [
        SavedTraining(path, int(match[1]))
        for one in _list_runs(attempt, goes_on_from)
        for folder in _list_attempts(one)
        for path in folder.iterdir()
        if (match := _NAME.fullmatch(path.name))
    ]
    return max(found, key=lambda saved: saved.steps, default=None)


def read_progress(saved: SavedTraining) -> LearningProgress:
    """Return what was written beside the engine's files."""
    return store.read_value(saved.folder / _PROGRESS, LearningProgress)


def find_unfinished(attempt: Path, steps: int) -> Path:
    """Return the folder that a checkpoint is written in until it is whole."""
    return attempt / f".checkpoint-{steps}"


def complete(attempt: Path, steps: int, progress: LearningProgress) -> int:
    """Give a checkpoint that all ranks have written its name, and remove this attempt's earlier ones; return its
    bytes."""
    unfinished = find_unfinished(attempt, steps)
    store.write_json(unfinished / _PROGRESS, progress)
    whole = unfinished.rename(attempt / f"checkpoint-{steps}")
    for path in attempt.iterdir():
        if _NAME.fullmatch(path.name) and path != whole:
            shutil.rmtree(path)
    return sum(file.stat().st_size for file in whole.rglob("*") if file.is_file())


def remove_all(attempt: Path, goes_on_from: str | None = None, *, but: Path | None = None) -> None:
    """Remove every checkpoint of this attempt's repeat, those included that are not whole, and those of the run that it
    went on from; `but` one that another run may go on from."""
    for one in _list_runs(attempt, goes_on_from):
        for folder in _list_attempts(one):
            for path in folder.iterdir():
                if _NAME.fullmatch(path.name.removeprefix(".")) and path != but:
                    shutil.rmtree(path, ignore_errors=True)


def _list_runs(attempt: Path, goes_on_from: str | None) -> list[Path]:
    """Return where the attempts lie that have a checkpoint of this training: each the folder of one of them."""
    return [attempt, *([attempt.parent.parent / goes_on_from / attempt.name] if goes_on_from else [])]


def _list_attempts(attempt: Path) -> list[Path]:
    """Return the folders of all attempts of a repeat, that of `attempt` among them."""
    repeat, _, _ = attempt.name.partition(".")
    return [one.folder for one in store.list_attempts(attempt.parent) if str(one.repeat) == repeat]
