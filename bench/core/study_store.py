"""Copy of a study's folder in an object store, for jobs on machines that cannot read the folder itself.

Objects have the names of the files: `<config_id>/<repeat>.<attempt>/…`, `jobs/<name>/…`. A job claims an attempt (one
try at a run) by creating its object `claim.json`. The claim contains the attempt's spec and its circumstance (how and
where it was started), so that no claimed attempt lacks them. The object `record.json` is created after all other files.
If several processes write it, the first one counts.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.core import store
from bench.core.errors import UserError
from bench.core.object_store import ObjectInfo, ObjectStore
from bench.core.record import Circumstance
from bench.core.spec import RunSpec
from bench.core.store import CIRCUMSTANCE, HEARTBEAT, INTERRUPTED, RECORD, SPEC, RunAttempt

CLAIM = "claim.json"
HEADERS = (CLAIM, HEARTBEAT, INTERRUPTED, RECORD)
"""Names of the files of an attempt that show whether it is running, and how it ended."""
_STUDY_FOLDERS = ("excluded", "jobs", "sweeps", "trials")
_ATTEMPT = re.compile(r"[^/]+/\d+\.\d+")
_UNSENT = re.compile(r"\..*|checkpoint-\d+")  # hidden files, and checkpoints, which are large
_SAME_TIME_S = 0.001  # object stores give times in milliseconds
_THREADS = 8


def build_log_path(folder: Path, task: int | None, node: int = 0) -> Path:
    """Return the path of the log of a job, or of one task of a job array, in the job's `folder`. Every node of the job
    writes its own log."""
    name = f"node{node}" if node else "job"
    return folder / (f"{name}.log" if task is None else f"{name}_{task}.log")


def check_spec(spec: RunSpec) -> None:
    """Raise UserError for a run whose checkpoints are needed by another run or by several nodes. Checkpoints are not
    copied to the object store: they stay on the disk of the node that wrote them."""
    learning, remedy = spec.learning, "use a launcher whose nodes share a file system, such as slurm"
    if learning.stop_after is not None:
        rule = "checkpoints are not copied to the object store, so that no other job can resume from them"
        raise UserError(f"learning.stop_after={learning.stop_after}", rule, remedy)
    if learning.checkpoint_every is not None and spec.nodes > 1:
        rule = f"each of the {spec.nodes} nodes would keep its part of the checkpoint on its own disk"
        raise UserError(f"learning.checkpoint_every={learning.checkpoint_every}", rule, remedy)


class StudyStore:
    """A study's copy in an object store, and the study's folder on this machine. The methods copy files between the
    two."""

    def __init__(self, objects: ObjectStore, folder: Path) -> None:
        """`objects` is the store at the study's URL. `folder` is created when the first file is copied to it."""
        self.objects, self.folder = objects, folder

    def without_patience(self) -> "StudyStore":
        """Return a copy of this `StudyStore` that does not repeat failed calls to the store."""
        return StudyStore(self.objects.without_patience(), self.folder)

    def open_attempt(
        self, config_folder: Path, spec: RunSpec, circumstance: Circumstance, *, new_repeat: bool = False
    ) -> RunAttempt:
        """Claim the next attempt, as `store.open_attempt` does on a shared file system. If another job has already
        claimed this attempt in the object store, claim the attempt with the next number."""
        while True:
            attempt = store.open_attempt(config_folder, spec, circumstance, new_repeat=new_repeat)
            if self._claim(attempt.folder):
                return attempt
            shutil.rmtree(attempt.folder)
            self.pull_attempts(config_folder.name)  # the attempt of the other job is now known here

    def push_attempt(self, folder: Path) -> None:
        """Write all files of a claimed attempt (one try at a run) to the store, the record last.

        If the store already has a record of this attempt, that record replaces the record in `folder`.
        """
        for path in sorted(_list_files(folder)):
            if path not in (folder / CLAIM, folder / RECORD):
                self.push(path)
        self._push_record(folder)

    def pull_attempts(self, config_id: str) -> None:
        """For all attempts at the configuration `config_id`, copy the new and changed files in HEADERS from the store.
        These files show whether an attempt is running, and how it ended."""
        self._pull(self.objects.list(config_id), lambda name: name.rpartition("/")[2] in HEADERS)

    def pull_attempt(self, folder: Path) -> None:
        """Copy the claim of one attempt from the store. The claim contains the attempt's spec and its circumstance (how
        and where the attempt was started)."""
        name = self._name(folder)
        self._pull(self.objects.list(name), lambda found: found == f"{name}/{CLAIM}")

    def push(self, *paths: Path) -> None:
        """Write files of the study's folder to the store. Skip a file that disappears meanwhile."""
        for path in paths:
            with contextlib.suppress(FileNotFoundError):
                self.objects.put(path, self._name(path))

    def pull_job(self, folder: Path) -> None:
        """Copy those files of a job from the store that do not exist on this machine."""
        found = self.objects.list(self._name(folder))
        self._pull(found, lambda name: not (self.folder / name).exists())

    def push_job(self, folder: Path) -> None:
        """Write a job's definition to the store, before the job is submitted."""
        self.push(*_list_files(folder))

    def withdraw_job(self, folder: Path) -> None:
        """Delete all files of a job from the store, after the scheduler refused the job."""
        for name in self.objects.list(self._name(folder)):
            self.objects.remove(name)

    def pull_file(self, path: Path) -> None:
        """Copy one file from the store, if the store has it."""
        with contextlib.suppress(FileNotFoundError):
            name = self._name(path)
            info = self.objects.stat(name)  # before the content, which may be newer but never older
            self._save(name, self.objects.read(name), info)

    def read(self, path: Path) -> bytes:
        """Return the content that a file has in the store. Raise FileNotFoundError if the store does not have it."""
        return self.objects.read(self._name(path))

    def remove(self, path: Path) -> None:
        """Delete a file from the store, and from this machine."""
        path.unlink(missing_ok=True)
        self.objects.remove(self._name(path))

    def sync(self) -> None:
        """Exchange all files with the store.

        New and changed files of attempts and jobs are copied to this machine. Records, job files and sweeps that only
        this machine has are copied to the store. Trained weights are not copied.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        found = self.objects.list()
        new = [folder for folder in self._list_recorded() if not (folder / CLAIM).exists()]
        for folder in new:
            with contextlib.suppress(store.Unreadable):  # reported by whichever command reads this attempt
                self.push_attempt(self._claim_or_renumber(folder))
        self._pull(self.objects.list() if new else found, _is_synced)
        for folder in self._list_recorded():
            if f"{self._name(folder)}/{RECORD}" not in found and folder not in new:
                self._push_record(folder)
        self._push_study_files(found)

    def _name(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _claim(self, folder: Path) -> bool:
        """Claim an attempt in the store by creating its claim. The local `folder` of the attempt contains the attempt's
        spec and circumstance (how and where it was started). Return True on success, and False if another process has
        already claimed an attempt with the same number."""
        described = {name: (folder / name).read_text() for name in (SPEC, CIRCUMSTANCE)}
        content = json.dumps({"token": secrets.token_hex(8), **described}, indent=1).encode()
        if not self.objects.create(self._name(folder / CLAIM), content):
            return False
        store.write_atomically(folder / CLAIM, content)
        return True

    def _claim_or_renumber(self, folder: Path) -> Path:
        """Claim an attempt that already has a record on this machine. If another process has claimed the attempt's
        number, move the attempt to the next number. Return the attempt's folder."""
        if self._claim(folder):
            return folder
        record = store.read_record(folder / RECORD)
        moved = self.open_attempt(folder.parent, record.spec, record.circumstance).folder
        placed = store.read_value(moved / CIRCUMSTANCE, Circumstance)
        for path in _list_files(folder):
            if path.parent == folder and path.name not in (RECORD, SPEC, CIRCUMSTANCE):
                shutil.copy2(path, moved / path.name)
        store.write_reserved(moved / RECORD, store.to_json(record.model_copy(update={"circumstance": placed})))
        store.release_reserved(moved)
        shutil.rmtree(folder)
        return moved

    def _push_record(self, folder: Path) -> None:
        """Create an attempt's record in the store. If the store already has a record, that record replaces the record
        on this machine."""
        path = folder / RECORD
        if not path.exists():
            return
        if self.objects.create(self._name(path), path.read_bytes()):
            self._stamp(path)
        else:
            self.pull_file(path)

    def _push_study_files(self, found: Mapping[str, ObjectInfo]) -> None:
        """Write the files of jobs, sweeps and trials that the store does not have, or that are newer on this machine.
        `found` holds the objects in the store by name."""
        for part in _STUDY_FOLDERS:
            for path in _list_files(self.folder / part):
                info, name = found.get(self._name(path)), self._name(path)
                newer = info is None or path.stat().st_mtime > info.modified_at + _SAME_TIME_S
                if newer and _is_synced(name):
                    self.push(path)
                    self._stamp(path)

    def _stamp(self, path: Path) -> None:
        """Set the modification time of a file to the time of its object in the store. The next `sync` then does not
        copy the file again."""
        modified_at = self.objects.stat(self._name(path)).modified_at
        os.utime(path, (modified_at, modified_at))

    def _list_recorded(self) -> Iterator[Path]:
        """Yield the folders of all attempts on this machine that have a record."""
        for config_folder in sorted(self.folder.iterdir()):
            if config_folder.name not in _STUDY_FOLDERS and config_folder.is_dir():
                for folder in sorted(config_folder.iterdir()):
                    if _ATTEMPT.fullmatch(self._name(folder)) and (folder / RECORD).exists():
                        yield folder

    def _pull(self, found: Mapping[str, ObjectInfo], is_wanted: Callable[[str], bool]) -> None:
        """Copy each object in `found` to this machine if the object is new or changed, and `is_wanted` returns True for
        its name. Claims (`claim.json`, which reserve an attempt for a job) are copied first, and records last."""
        wanted = [name for name, info in found.items() if is_wanted(name) and self._is_new(name, info)]
        last = {CLAIM: 0, RECORD: 2}
        with ThreadPoolExecutor(_THREADS) as pool:
            for turn in range(3):
                names = [name for name in wanted if last.get(name.rpartition("/")[2], 1) == turn]
                names = [name for name in names if turn == 0 or not self._is_unclaimed(name)]
                for name, content in zip(names, pool.map(self._read, names), strict=True):
                    if content is not None:
                        self._save(name, content, found[name])

    def _read(self, name: str) -> bytes | None:
        try:
            return self.objects.read(name)
        except FileNotFoundError:  # removed meanwhile, like the files through which a job's nodes find each other
            return None

    def _is_new(self, name: str, info: ObjectInfo) -> bool:
        """Return True if an object differs from its file on this machine, or if there is no file.

        An object of a job or sweep counts as different only if it is newer than its file. An object of an attempt
        counts as different if its size or its time is not that of the file.
        """
        path = self.folder / name
        if path.name == CLAIM:  # a claim never changes; its content is written to two other files
            return not (path.with_name(CIRCUMSTANCE).exists() or self._is_unclaimed(name))
        try:
            here = path.stat()
        except FileNotFoundError:
            return True
        newer_s = info.modified_at - here.st_mtime
        if name.split("/")[0] in _STUDY_FOLDERS:
            return newer_s > _SAME_TIME_S
        return here.st_size != info.size or abs(newer_s) > _SAME_TIME_S

    def _is_unclaimed(self, name: str) -> bool:
        """Return True if the object `name` belongs to an attempt, and the attempt's folder on this machine has no
        claim. A folder without a claim belongs to a different attempt with the same number."""
        folder = (self.folder / name).parent
        is_attempt = _ATTEMPT.fullmatch(name.rpartition("/")[0]) is not None
        return is_attempt and (folder / CIRCUMSTANCE).exists() and not (folder / CLAIM).exists()

    def _save(self, name: str, content: bytes, info: ObjectInfo) -> None:
        """Write an object's content to its file on this machine. A claim also contains the spec and the circumstance of
        its attempt (how and where the attempt was started). Write the spec and the circumstance to separate files,
        too."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        described: dict[str, str] = {}
        if path.name == CLAIM:
            try:
                plain = json.loads(content)
                described = {part: plain[part] for part in (SPEC, CIRCUMSTANCE)}
            except (ValueError, KeyError, TypeError) as error:
                rule, remedy = "is not a claim file of zeroscale", "delete this object"
                raise UserError(f"{self.objects.url}/{name}", rule, remedy) from error
        for part, text in {path.name: content, **{part: text.encode() for part, text in described.items()}}.items():
            store.write_atomically(path.with_name(part), text, sync=False, modified_at=info.modified_at)


def sync(study_folder: Path, url: str) -> None:
    """Exchange a study's folder with its copy at a URL, such as gs://bucket/zeroscale/study. See `StudyStore.sync`."""
    try:
        StudyStore(ObjectStore(url), study_folder).sync()
    except OSError as error:
        raise store.build_unwritable_error(study_folder, error) from error


def _is_synced(name: str) -> bool:
    """Return True if a file of the study is copied to and from the object store. `name` is its path in the study.

    Files directly in the folder of an attempt, job, sweep or trial are copied. Files in subfolders of these, such as
    trained weights, are not. Also excluded are the files through which the nodes of a running job find each other.
    """
    parts = name.split("/")
    if parts[0] in _STUDY_FOLDERS:
        return len(parts) <= 3 and not parts[-1].startswith("meeting-")
    return len(parts) == 3 and _ATTEMPT.fullmatch("/".join(parts[:2])) is not None


def _list_files(folder: Path) -> Iterable[Path]:
    """Yield all files below a folder, except hidden files and checkpoints."""
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not _UNSENT.fullmatch(name)]
        yield from (Path(parent, name) for name in names if not name.startswith("."))
