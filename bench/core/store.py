"""Results folders. A configuration is measured in one or more repeats, and an attempt is one try at a repeat. Each
attempt has its own folder `<runs>/<study>/<config_id>/<repeat>.<attempt>/`, which no later attempt changes.

Files are written to a temporary file and then renamed, so that readers see only whole files. An attempt claims its
folder by an exclusive `mkdir`, so that two processes cannot have the same attempt.
"""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import pydantic_core
from pydantic import BaseModel, ValidationError

from bench.core import files
from bench.core.errors import UserError
from bench.core.field_errors import describe_error
from bench.core.private import mask_tokens
from bench.core.record import SCHEMA_VERSION, Circumstance, Environment, Evidence, Outcome, OutcomeKind, RunRecord
from bench.core.record_checks import find_broken_rule, migrate
from bench.core.spec import AdaptiveMeasure, RunSpec, config_id

RECORD, SPEC, CIRCUMSTANCE, ENVIRONMENT = "record.json", "spec.json", "circumstance.json", "environment.json"
STEPS, LOG, HEARTBEAT, RENDEZVOUS = "steps.parquet", "run.log", "heartbeat.json", "rendezvous.json"
INTERRUPTED = "interrupted.json"
MODEL, ADAPTER = "model", "adapter"
"""Folders of the trained model and of its adapters, in the attempt's folder."""
UNINSPECTED = "the run ended before its untimed steps did"
"""Value of `observations.uninspected` until the untimed steps after the window have ended. A run that fails in these
steps still counts as measured."""

PAUSED = "paused_s"
"""Key in an outcome's dict `evidence`: seconds during which the attempt was paused. Step times of a paused attempt are
not used."""

_ATTEMPT = re.compile(r"(\d+)\.(\d+)")
_BEGINNING_BYTES = 8192
_END_BYTES = 256  # older records have `drill` at the end of observations, not in the outcome
_FAULT_SEEN = "drill at the end"
_NO_RECORD = "not a zeroscale record"
_OUTCOMES = frozenset(get_args(OutcomeKind))
_RESERVE_LIMIT_BYTES = 4 * 2**20  # a file above this size may fail on a full disk
_USUAL_STEPS = 1000  # steps of a window of 60 s if a step takes 60 ms

_OF_TODAY = re.compile(rb'\s*\{\s*"schema_version"\s*:\s*%d\s*,' % SCHEMA_VERSION)

_Value = TypeVar("_Value", bound=BaseModel)


class Unreadable(UserError):
    """Error: a record or another file of a results folder has invalid content for this version of zeroscale. `why` is
    the reason."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(str(path), why)
        self.path, self.why = path, why


class RunAttempt(NamedTuple):
    """An attempt (one try at a run): its folder and, if there is a readable record, facts from it such as the
    outcome."""

    folder: Path
    repeat: int
    attempt: int
    outcome: OutcomeKind | None = None
    reason: str = ""
    machine: str = ""
    environment_id: str | None = None
    unreadable: str = ""  # why the record cannot be read; empty otherwise
    job: str = ""  # name of the allocation in which it ran; empty without a scheduler
    drill: bool = False  # True: a fault was injected, so that the run is not a measurement
    excused: bool = False  # True: the disk was full or the machine stayed busy, so the outcome is not due to the point
    paused_s: float = 0.0  # seconds during which it was suspended or stopped


def build_unwritable_error(folder: Path, error: OSError) -> UserError:
    """Return the UserError for a results folder that cannot be written to, such as on a full disk."""
    remedy = "free some space or choose another results folder"
    if isinstance(error, PermissionError | NotADirectoryError):
        remedy = "name a folder in which you may write"
    return UserError(str(folder), f"cannot be written to ({error.strerror})", remedy)


def write_atomically(
    path: Path, content: bytes, mode: int = 0o644, *, sync: bool = True, modified_at: float | None = None
) -> None:
    """Write `content` to `path` in one step: a reader sees either the old file or the whole new file.

    `sync` is False for a file that is not needed after a crash of the machine. `modified_at` becomes the modification
    time of the file, in seconds since the epoch.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.touch(0o600, exist_ok=False)
    try:
        with temporary.open("wb") as file:
            file.write(content)
            if sync:  # before the rename, so that the new name does not lead to an empty file after a crash
                file.flush()
                os.fsync(file.fileno())
        temporary.chmod(mode)
        if modified_at is not None:
            os.utime(temporary, (modified_at, modified_at))
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, value: BaseModel) -> None:
    """Write a value as indented JSON in one step. Raise OSError on a full disk."""
    write_atomically(path, to_json(value))


def reserve(path: Path, size_bytes: int) -> None:
    """Allocate `size_bytes` on the disk for the file that `write_reserved` will later write at `path`.

    With the reservation, this file can be written even if the disk fills up during the run. Raise UserError if there is
    not enough space now.
    """
    reserved = _build_reserved_path(path)
    try:
        with reserved.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
    except OSError as error:
        reserved.unlink(missing_ok=True)
        why = f"cannot reserve {size_bytes} bytes for the record ({error.strerror})"
        raise UserError(str(path.parent), why, "free some space or choose another results folder") from error


def write_reserved(path: Path, content: bytes) -> bool:
    """Write `content` to `path` in one step, into the disk space that was reserved for it, if any.

    An existing file is not changed: if two processes write the record of one attempt, the first record counts. Return
    True if this call wrote the file, and False if the file existed.
    """
    reserved, own = _build_reserved_path(path), path.with_name(f".{path.name}.{secrets.token_hex(4)}.reserved")
    with contextlib.suppress(FileNotFoundError):
        reserved.rename(own)  # from here on, no other process writes into the reserved file
    try:
        if not own.exists() or own.stat().st_size < len(content):
            write_atomically(own, content)
        else:
            with own.open("r+b") as file:
                file.write(content)
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
    except OSError:
        own.unlink(missing_ok=True)  # other writers may need its disk space
        raise
    named = _link_name(own, path)
    own.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # some file systems do not support fsync of a folder
        descriptor = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)  # the file's name must survive a crash of the machine, too
        finally:
            os.close(descriptor)
    return named


def _link_name(own: Path, path: Path) -> bool:
    """Rename `own` to `path` unless `path` exists. Return True if `own` is now at `path`, otherwise False."""
    try:
        os.link(own, path)
    except FileExistsError:
        # A network file system may repeat a link call that succeeded. The repetition finds its own new name.
        return path.exists() and own.samefile(path)
    except OSError:  # the file system has no hard links, or no space for another name
        try:
            os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            return False
        except OSError:
            if path.exists():
                return False
        own.replace(path)
    return True


def release_reserved(folder: Path) -> None:
    """Delete the files with which `reserve` reserved disk space in `folder`, if they were not used."""
    for leftover in folder.glob(".*.reserved"):
        leftover.unlink(missing_ok=True)


def _build_reserved_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserved")


def to_json(value: BaseModel) -> bytes:
    """Return a value as indented JSON text. Access tokens are masked, since error messages of libraries may contain
    them."""
    return mask_tokens(value.model_dump_json(indent=1, by_alias=True).encode()) + b"\n"


def list_attempts(config_folder: Path) -> list[RunAttempt]:
    """Return all attempts (tries at a run) in the folder of one configuration, sorted by repeat and attempt number. An
    attempt without a readable record has no outcome."""
    # scandir is faster than iterdir, and studies have thousands of folders.
    with contextlib.suppress(FileNotFoundError):
        found = ((Path(entry.path), _ATTEMPT.fullmatch(entry.name)) for entry in os.scandir(config_folder))
        made = (_read_header(RunAttempt(path, int(match[1]), int(match[2]))) for path, match in found if match)
        return sorted(made, key=lambda one: (one.repeat, one.attempt))
    return []


def _read_header(attempt: RunAttempt) -> RunAttempt:
    """Return an attempt with the outcome from its record. The rest of the record is not decoded: this makes it possible
    to read thousands of records in a second."""
    try:
        return attempt._replace(**_parse_header(_read_beginning(attempt.folder / RECORD)))
    except FileNotFoundError:
        return attempt
    except OSError as error:
        return attempt._replace(unreadable=error.strerror or str(error))
    except (ValueError, KeyError, TypeError, AttributeError):
        return attempt._replace(unreadable=_NO_RECORD)


def _parse_header(plain: dict[str, Any]) -> dict[str, Any]:
    """Read the values of some fields of RunAttempt from `plain`, a decoded record. Return a dict by field name. Raise
    KeyError or TypeError for an invalid record."""
    outcome, environment, circumstance = plain["outcome"], plain["environment"], plain["circumstance"]
    header = {
        "outcome": outcome["kind"],
        "reason": outcome["reason"],
        "machine": circumstance["machine"]["name"],
        "environment_id": environment["environment_id"] if environment is not None else "",
        "job": (circumstance.get("launcher") or {}).get("job") or "",
    }
    if not all(isinstance(text, str) for text in header.values()) or header["outcome"] not in _OUTCOMES:
        raise TypeError("a header field is not text, or the outcome is unknown")
    if header["outcome"] == "ok" and plain["observations"] is None:
        raise TypeError("outcome ok without observations")
    evidence, observed = outcome.get("evidence") or {}, plain["observations"] or {}
    return header | {
        "environment_id": header["environment_id"] or None,
        "drill": bool(evidence.get("drill") or observed.get("drill") or plain.get(_FAULT_SEEN)),
        "excused": bool(evidence.get("disk_full") or evidence.get("not_quiet")),
        "paused_s": float(evidence.get(PAUSED) or 0.0),
    }


def _read_beginning(path: Path) -> dict[str, Any]:
    """Return the plain values of a record, decoded from the first bytes of the file. The observations are the last and
    the largest field of a record. If the file is longer, the result lacks the end of the observations.

    If the file does not end like a record, the whole file is decoded. For a truncated file, this raises ValueError.
    """
    with open(path, "rb", buffering=0, opener=files.open_regular) as file:
        content = file.read(_BEGINNING_BYTES)
        if len(content) == _BEGINNING_BYTES:
            file.seek(-_END_BYTES, os.SEEK_END)
            end = file.read()
            if end.rstrip().endswith(b"\n}"):  # in indented JSON, only the outermost brace begins a line
                plain: dict[str, Any] = pydantic_core.from_json(content, allow_partial=True)
                if "observations" in plain:
                    return plain | {_FAULT_SEEN: b'\n  "drill": "' in end}
            file.seek(0)
            content = file.read()
    whole: dict[str, Any] = pydantic_core.from_json(content)
    return whole


def create_attempt(config_folder: Path, repeat: int | None) -> RunAttempt:
    """Create the folder of the next attempt (one try at a run) at the repeat with the number `repeat`. If `repeat` is
    None, create the folder of the first attempt at a new repeat. No other process gets the same folder."""
    config_folder.mkdir(parents=True, exist_ok=True)
    found = (_ATTEMPT.fullmatch(path.name) for path in config_folder.iterdir())
    used = [(int(match[1]), int(match[2])) for match in found if match]
    number = max((one for one, _ in used), default=-1) + 1 if repeat is None else repeat
    attempt = max((attempt for one, attempt in used if one == number), default=-1) + 1
    while True:
        folder = config_folder / f"{number}.{attempt}"
        with contextlib.suppress(FileExistsError):  # another process claimed it first, perhaps on another node
            folder.mkdir()
            return RunAttempt(folder, number, attempt)
        number, attempt = (number + 1, 0) if repeat is None else (number, attempt + 1)


def open_attempt(
    config_folder: Path, spec: RunSpec, circumstance: Circumstance, *, new_repeat: bool = False, claim: bytes = b""
) -> RunAttempt:
    """Create the folder of the next attempt, reserve disk space for its record, and write its spec and circumstance.

    The attempt belongs to the repeat in `circumstance` or, with `new_repeat`, to a new repeat. The written circumstance
    has the numbers of this repeat and attempt. `claim` is the content of the first heartbeat file, which identifies
    this process. The attempt's supervisor (the process that watches the ranks of a node) writes later heartbeats.
    """
    if isinstance(spec.measure, AdaptiveMeasure):
        rule = "this protocol is from an older version and can no longer be run"
        raise UserError("measure", rule, "plan the study again, in a new results folder")
    attempt = create_attempt(config_folder, None if new_repeat else circumstance.repeat)
    numbers = {"repeat": attempt.repeat, "attempt": attempt.attempt}
    # The sizes are estimates on the high side. The reserved space is released when the run ends.
    ranks, steps = spec.world_size, spec.measure.warmup_steps + max(spec.measure.min_steps, _USUAL_STEPS)
    try:
        reserve(attempt.folder / RECORD, min(512 * 1024 + 2048 * ranks + 128 * steps, _RESERVE_LIMIT_BYTES))
        reserve(attempt.folder / STEPS, min(64 * 1024 + 64 * ranks * steps, _RESERVE_LIMIT_BYTES))
        write_json(attempt.folder / SPEC, spec)
        if claim:  # written before the circumstance, without which an attempt does not count
            write_atomically(attempt.folder / HEARTBEAT, claim)
        write_json(attempt.folder / CIRCUMSTANCE, circumstance.model_copy(update=numbers))
    except (OSError, UserError):
        shutil.rmtree(attempt.folder, ignore_errors=True)  # no other process uses the folder yet
        raise
    return attempt


def drop_claim(folder: Path) -> None:
    """Remove the folder of an attempt (one try at a run) if it contains only the spec, the heartbeat and hidden files.
    Such a folder remains if a process is killed before it has written `circumstance.json`."""
    with contextlib.suppress(OSError):
        if all(path.name in (SPEC, HEARTBEAT) or path.name.startswith(".") for path in folder.iterdir()):
            shutil.rmtree(folder)


def finalize(folder: Path, outcome: Outcome, evidence: Evidence = "measured", *, paused_s: float = 0.0) -> RunRecord:
    """Return the record of an ended attempt. If no rank wrote a record, first write a record with `outcome`, which the
    supervisor (the process that watches the ranks) has determined.

    `evidence` is `predicted` if the run was not started, because it was predicted to exceed memory. `paused_s` is the
    number of seconds for which the run was paused during its steps; it is added to the record.
    """
    path = folder / RECORD
    if not path.exists():
        environment: Environment | None = None
        with contextlib.suppress(OSError, Unreadable):  # it failed before it wrote its environment
            environment = read_value(folder / ENVIRONMENT, Environment)
        spec = read_value(folder / SPEC, RunSpec)
        record = RunRecord(
            config_id=config_id(spec),
            evidence=evidence,
            spec=spec,
            circumstance=read_value(folder / CIRCUMSTANCE, Circumstance),
            environment=environment,
            outcome=outcome,
        )
        write_reserved(path, to_json(record))
    release_reserved(folder)
    return _complete_record(path, outcome, paused_s)


def _complete_record(path: Path, outcome: Outcome, paused_s: float) -> RunRecord:
    """Complete the record at `path` with facts from the supervisor (the process that watches the ranks), and return the
    record. Add the reason in `outcome` if the run ended before it had completed the untimed steps that follow the
    measurement window. Add `paused_s`, the seconds for which the run was paused, if it is not 0."""
    record, changed = read_record(path), dict[str, Any]()
    observed = record.observations
    if observed is not None and observed.uninspected == UNINSPECTED and outcome.reason:
        changed["observations"] = observed.model_copy(update={"uninspected": f"{UNINSPECTED}: {outcome.reason}"})
    if paused_s and not record.outcome.paused_s:
        noted = record.outcome.evidence | {PAUSED: round(paused_s, 1)}
        changed["outcome"] = record.outcome.model_copy(update={"evidence": noted})
    if not changed:
        return record
    record = record.model_copy(update=changed)
    with contextlib.suppress(OSError):  # the record is usable without this update
        write_json(path, record)
    return record


def find_records(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield the path of every `record.json` at or below `paths`, sorted within each path. Archives are searched, too.
    Raise UserError if a path does not exist."""
    for path in paths:
        if not files.exists(path):
            raise UserError(str(path), "no such file or folder", "name a results folder, such as results/runs/smoke")
        if files.split_archive(path)[0]:
            yield from _find_packed(path, files.list_members)
        elif path.is_file():
            yield path
        else:
            # The filter is needed because a folder may have the suffix of an archive.
            archives = filter(Path.is_file, path.rglob(f"*{files.ARCHIVE}"))
            packed = (found for one in archives for found in _find_packed(one, files.list_packed))
            yield from sorted([*path.rglob(RECORD), *packed])


def _find_packed(path: Path, list_files: Callable[[Path], Iterable[str]]) -> list[Path]:
    try:
        names = list(list_files(path))
    except OSError:
        return [path]  # a later read reports why it is unreadable
    return [path / name for name in names if name.rpartition("/")[2] in (RECORD, "")]


def read_record(path: Path) -> RunRecord:
    """Read a record of the current or an older schema version. Raise Unreadable for any other content."""
    content = _read_content(path)
    try:
        if _OF_TODAY.match(content):
            record = RunRecord.model_validate_json(content)
        else:
            record = RunRecord.model_validate(_migrate_content(content, path))
    except ValidationError as error:
        raise Unreadable(path, _describe_invalid(error, RunRecord, content)) from error
    # Records of the current version are checked, too: a user may have edited the file.
    if rule := find_broken_rule(record):
        raise Unreadable(path, rule)
    return record


def read_value(path: Path, kind: type[_Value]) -> _Value:
    """Read a JSON file of a run directory, such as the spec, as an instance of `kind`. For the record, use
    `read_record`. Raise Unreadable for invalid content."""
    content = _read_content(path)
    try:
        return kind.model_validate_json(content)
    except ValidationError as error:
        raise Unreadable(path, _describe_invalid(error, kind, content)) from error


def _describe_invalid(error: ValidationError, kind: type[BaseModel], content: bytes) -> str:
    """Return the reason why the content of a JSON file is invalid. There is a separate message for a file that ends too
    early, for example because the disk was full."""
    first = error.errors(include_url=False, include_input=False)[0]
    if first["type"] == "json_invalid" and "EOF" in first["msg"]:
        return f"not complete JSON, it ends after {len(content):,} bytes; restore it from a copy"
    return describe_error(error, kind)


def _read_content(path: Path) -> bytes:
    try:
        return files.read_regular(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unreadable(path, error.strerror or str(error)) from error


def _migrate_content(content: bytes, path: Path) -> dict[str, Any]:
    """Decode a record of an older schema version and convert it to plain values of the current version."""
    try:
        plain: dict[str, Any] = pydantic_core.from_json(content)
        version = plain["schema_version"]
        if type(version) is not int:  # True would compare equal to 1
            raise TypeError(version)
        if version > SCHEMA_VERSION:
            raise Unreadable(path, f"schema version {version} is newer than {SCHEMA_VERSION}; upgrade zeroscale")
        return migrate(plain, path.with_name(STEPS))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Unreadable(path, _NO_RECORD) from error
