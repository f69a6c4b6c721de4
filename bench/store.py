"""Results folders: `<runs>/<study>/<config_id>/<repeat>.<attempt>/`, one per attempt, append-only.

Files appear whole (temporary file, then rename), and a used folder is never written again: claiming one is an
exclusive `mkdir`, so that two processes cannot own the same attempt.
"""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from bench.errors import UserError
from bench.record import FINAL, Circumstance, Environment, Outcome, OutcomeKind, RunRecord
from bench.spec import SCHEMA_VERSION, RunSpec, config_id

RECORD, SPEC, CIRCUMSTANCE, ENVIRONMENT = "record.json", "spec.json", "circumstance.json", "environment.json"
STEPS, LOG, HEARTBEAT, RENDEZVOUS = "steps.parquet", "run.log", "heartbeat.json", "rendezvous.json"

_RESERVE_LIMIT_BYTES = 4 * 2**20  # a longer series has to find its space when it is written

_MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""From schema version n to n + 1, on plain JSON."""


class Unreadable(Exception):
    """A file that is not a record this version can read; says which and why."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path, self.why = path, why


class Attempt(NamedTuple):
    """One run directory and how it ended; `outcome` is None while it has no record."""

    folder: Path
    repeat: int
    attempt: int
    outcome: OutcomeKind | None


def write_atomically(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write `content` to `path` so that a reader sees the old file or the whole new one."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_json(path: Path, value: BaseModel) -> None:
    """Write a value as indented JSON, whole or not at all; OSError when the disk is full."""
    write_atomically(path, to_json(value))


def reserve(path: Path, size_bytes: int) -> None:
    """Allocate `size_bytes` on the disk for the file that `fill` will write at `path`, so that a disk that fills up
    during the run cannot lose it. Raise UserError where there is no such space now."""
    reserved = _reserved(path)
    try:
        with reserved.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
    except OSError as error:
        reserved.unlink(missing_ok=True)
        why = f"cannot reserve {size_bytes} bytes for the record ({error.strerror})"
        raise UserError(str(path.parent), why, "free some space or choose another results folder") from error


def fill(path: Path, content: bytes) -> None:
    """Write `content` to `path` whole, into the blocks reserved for it if any: that needs no free space."""
    reserved = _reserved(path)
    if not reserved.exists() or reserved.stat().st_size < len(content):
        reserved.unlink(missing_ok=True)
        write_atomically(path, content)
        return
    with reserved.open("r+b") as file:
        file.write(content)
        file.truncate()
        file.flush()
        os.fsync(file.fileno())
    reserved.replace(path)


def release(folder: Path) -> None:
    """Give back what was reserved in `folder` and not filled."""
    for leftover in folder.glob(".*.reserved"):
        leftover.unlink(missing_ok=True)


def _reserved(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserved")


def to_json(value: BaseModel) -> bytes:
    """Return a value as indented JSON text."""
    return value.model_dump_json(indent=1, by_alias=True).encode() + b"\n"


def attempts(config_folder: Path) -> list[Attempt]:
    """List the attempts at one point in order of repeat and attempt; a record that cannot be read has no outcome."""
    found = []
    for folder in config_folder.glob("*.*"):
        if match := re.fullmatch(r"(\d+)\.(\d+)", folder.name):
            outcome: OutcomeKind | None = None
            with contextlib.suppress(Unreadable, FileNotFoundError):
                outcome = read_record(folder / RECORD).outcome.kind
            found.append(Attempt(folder, int(match[1]), int(match[2]), outcome))
    return sorted(found, key=lambda a: (a.repeat, a.attempt))


def answered(config_folder: Path, repeat: int, machine: str, environment_id: str | None) -> Attempt | None:
    """Return the attempt that answers this point for good on this machine in this environment class, if any.

    `environment_id` None accepts every class: where it cannot be known, the worker asks again when it starts.
    """
    for attempt in attempts(config_folder):
        if attempt.repeat != repeat or attempt.outcome not in FINAL:
            continue
        record = read_record(attempt.folder / RECORD)
        found = record.environment.environment_id if record.environment else None
        if record.circumstance.machine.name == machine and environment_id in (None, found):
            return attempt
    return None


def next_repeat(config_folder: Path) -> int:
    """Return the first repeat nobody has started."""
    return max((a.repeat for a in attempts(config_folder)), default=-1) + 1


def claim(config_folder: Path, repeat: int) -> Attempt:
    """Make the next attempt's folder for `repeat`; it belongs to the caller alone."""
    config_folder.mkdir(parents=True, exist_ok=True)
    attempt = max((a.attempt for a in attempts(config_folder) if a.repeat == repeat), default=-1) + 1
    while True:
        folder = config_folder / f"{repeat}.{attempt}"
        try:
            folder.mkdir()
        except FileExistsError:
            attempt += 1
        else:
            return Attempt(folder, repeat, attempt, None)


def open_attempt(config_folder: Path, spec: RunSpec, circumstance: Circumstance) -> Attempt:
    """Claim the next attempt and write what it is to do; its record has room reserved from now on.

    `circumstance` gives the repeat; its attempt number is the one that was claimed.
    """
    attempt = claim(config_folder, circumstance.repeat)
    ranks, steps = spec.world_size, spec.measure.warmup_max_steps + spec.measure.max_steps
    reserve(attempt.folder / RECORD, min(512 * 1024 + 2048 * ranks + 128 * steps, _RESERVE_LIMIT_BYTES))
    reserve(attempt.folder / STEPS, min(64 * 1024 + 64 * ranks * steps, _RESERVE_LIMIT_BYTES))
    write_json(attempt.folder / SPEC, spec)
    write_json(attempt.folder / CIRCUMSTANCE, circumstance.model_copy(update={"attempt": attempt.attempt}))
    return attempt


def conclude(folder: Path, outcome: Outcome) -> RunRecord:
    """Return the record of an attempt, writing one with `outcome` if no rank left any: where the workers could not,
    whoever watched them says how it ended."""
    path = folder / RECORD
    if not path.exists():
        environment: Environment | None = None
        with contextlib.suppress(OSError, ValidationError):  # it failed before it knew where it was
            environment = Environment.model_validate_json((folder / ENVIRONMENT).read_bytes())
        spec = RunSpec.model_validate_json((folder / SPEC).read_bytes())
        record = RunRecord(
            config_id=config_id(spec),
            spec=spec,
            circumstance=Circumstance.model_validate_json((folder / CIRCUMSTANCE).read_bytes()),
            environment=environment,
            outcome=outcome,
        )
        fill(path, to_json(record))
    release(folder)
    return read_record(path)


def find_records(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield every `record.json` at or below `paths`, sorted within each; UserError for a path that is not there."""
    for path in paths:
        if not path.exists():
            raise UserError(str(path), "no such file or folder", "give a results folder, e.g. results/runs/smoke")
        yield from [path] if path.is_file() else sorted(path.rglob(RECORD))


def read_record(path: Path) -> RunRecord:
    """Read a record of this or an older schema version; raise Unreadable for anything else."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unreadable(path, error.strerror or str(error)) from error
    try:
        plain = json.loads(content)
        version = plain["schema_version"]
    except (ValueError, TypeError, KeyError) as error:
        raise Unreadable(path, "not a zeroscale record") from error
    if not isinstance(version, int) or version > SCHEMA_VERSION:
        raise Unreadable(path, f"schema version {version} is newer than {SCHEMA_VERSION}; upgrade zeroscale")
    while version in _MIGRATIONS:
        plain = _MIGRATIONS[version](plain)
        version += 1
    try:
        return RunRecord.model_validate(plain)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise Unreadable(path, f"{where}: {first['msg']}") from error
