"""Checkpoints of a training, in the folder of the attempt that wrote them.

An attempt is one try at a run. A repeat is one of several measurements of the same configuration, and a failed repeat
is attempted again.

A folder has the name `checkpoint-<steps>` only if its checkpoint is complete. If an attempt fails, the next attempt at
the same repeat resumes from the checkpoint. A run that continues a stopped training resumes from the checkpoint of the
stopped run. Each attempt keeps only its latest checkpoint. The attempt that completes the training removes all
checkpoints. If the training stops early (`stop_after`), the last checkpoint is kept.
"""

import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.core import store
from bench.core.errors import UserError
from bench.core.record import Evaluation
from bench.core.spec import Frozen
from bench.models.checkpoint import compute_fingerprint

_NAME = re.compile(r"checkpoint-(\d+)")
_PROGRESS = "progress.json"


class LearningProgress(Frozen):
    """Training time and evaluations up to a checkpoint, stored next to the engine's own files."""

    trained_s: float = 0.0  # seconds of all optimizer steps, over all attempts
    evaluations: tuple[Evaluation, ...] = ()
    inputs: dict[str, str] = {}  # hashes of the data and of the weights from which the training started, by key


def hash_inputs(data: Mapping[str, Any], checkpoint: str | None, folder: Path | None) -> dict[str, str]:
    """Return hashes of what a training starts from, by key of the config. `data` are the facts about the data from the
    record, and `folder` has the files of `checkpoint`."""
    hashes = {"data": data["corpus"]["sha256"]} if "sha256" in data.get("corpus", {}) else {}
    return hashes | ({"model.checkpoint": compute_fingerprint(checkpoint, folder)} if checkpoint and folder else {})


class SavedTraining(NamedTuple):
    """A complete checkpoint, from which a training can resume."""

    folder: Path
    steps: int  # number of optimizer steps before this checkpoint

    def read_progress(self) -> LearningProgress:
        """Return the training time and evaluations stored in this checkpoint."""
        return store.read_value(self.folder / _PROGRESS, LearningProgress)

    def check_inputs(self, inputs: Mapping[str, str]) -> None:
        """Raise UserError if this checkpoint is of a training with other data or other initial weights than `inputs`, a
        dict with a hash of each. Inputs that are unknown on one side are not compared."""
        before = self.read_progress().inputs
        if changed := sorted(key for key in before.keys() & inputs.keys() if before[key] != inputs[key]):
            rule = f"was trained with other contents of {' and '.join(changed)}, which changed since"
            raise UserError(str(self.folder), rule, "restore them, or remove this folder to train from the start")


def find_latest(attempt: Path, goes_on_from: str | None = None) -> SavedTraining | None:
    """Return the checkpoint with the most steps in the attempt folders of one repeat; None if there is none. A repeat
    is one of several numbered measurements of a configuration. An attempt is one try at a repeat. `attempt` is the
    folder of any attempt at the repeat.

    If this run continues a stopped run, `goes_on_from` is the config_id of the stopped run. Checkpoints of the repeat
    with the same number in the stopped run are then included.
    """
    found = (
        SavedTraining(path, int(match[1]))
        for path in _list_entries(attempt, goes_on_from)
        if (match := _NAME.fullmatch(path.name))
    )
    return max(found, key=lambda saved: saved.steps, default=None)


def find_unfinished(attempt: Path, steps: int) -> Path:
    """Return the path of the hidden folder that contains the checkpoint of step `steps` until it is complete."""
    return attempt / f".checkpoint-{steps}"


def complete(attempt: Path, steps: int, progress: LearningProgress) -> int:
    """Make a checkpoint valid after all ranks have written it, and return its size in bytes.

    The folder gets its final name, and the earlier checkpoints of this attempt are removed.
    """
    unfinished = find_unfinished(attempt, steps)
    store.write_json(unfinished / _PROGRESS, progress)
    # The rename is atomic. So a checkpoint with this name is complete, even if a process is killed at any time.
    whole = unfinished.rename(attempt / f"checkpoint-{steps}")
    for path in attempt.iterdir():
        if _NAME.fullmatch(path.name) and path != whole:
            shutil.rmtree(path)
    return count_bytes(whole)


def count_bytes(folder: Path) -> int:
    """Return the total size in bytes of all files in a folder and its subfolders."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def remove_all(attempt: Path, goes_on_from: str | None = None, *, but: Path | None = None) -> None:
    """Remove all checkpoints, complete or not, of one repeat (numbered measurement of a configuration). The repeat may
    have several attempts (tries), and `attempt` is the folder of any of them.

    If this run continues an earlier run, `goes_on_from` is the name of the earlier run's folder. Checkpoints of the
    repeat with the same number in the earlier run are then removed too. The checkpoint folder `but` is kept, because
    another run may resume from it.
    """
    for path in _list_entries(attempt, goes_on_from):
        if _NAME.fullmatch(path.name.removeprefix(".")) and path != but:
            shutil.rmtree(path, ignore_errors=True)


def _list_entries(attempt: Path, goes_on_from: str | None) -> Iterator[Path]:
    """Yield the paths of everything in the attempt folders of one repeat. A repeat is one of several numbered
    measurements of a configuration. An attempt is one try at a repeat. `attempt` is the folder of any attempt at the
    repeat.

    If the run continues an earlier run, `goes_on_from` is the name of the earlier run's folder. Attempt folders of the
    repeat with the same number in the earlier run are then included.
    """
    runs = [attempt.parent, *([attempt.parent.parent / goes_on_from] if goes_on_from else [])]
    repeat, _, _ = attempt.name.partition(".")
    for run in runs:
        for found in store.list_attempts(run):
            if str(found.repeat) == repeat:
                yield from list(found.folder.iterdir())
