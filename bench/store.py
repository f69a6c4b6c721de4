"""Results folders: `<runs>/<study>/<config_id>/<repeat>.<attempt>/`, one per attempt, append-only.

Files appear whole (temporary file, then rename), and a used folder is never written again: claiming one is an
exclusive `mkdir`, so that two processes cannot own the same attempt.
"""

import contextlib
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pydantic_core
from pydantic import BaseModel, ValidationError

from bench.errors import UserError
from bench.record import FINAL, Circumstance, Environment, Evidence, Outcome, OutcomeKind, RunRecord
from bench.spec import SCHEMA_VERSION, RunSpec, config_id

RECORD, SPEC, CIRCUMSTANCE, ENVIRONMENT = "record.json", "spec.json", "circumstance.json", "environment.json"
STEPS, LOG, HEARTBEAT, RENDEZVOUS = "steps.parquet", "run.log", "heartbeat.json", "rendezvous.json"
INTERRUPTED = "interrupted.json"

_ATTEMPT = re.compile(r"(\d+)\.(\d+)")
_BEGINNING_BYTES = 8192
_RESERVE_LIMIT_BYTES = 4 * 2**20  # a longer series has to find its space when it is written

_MIGRATIONS: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""From schema version n to n + 1, on plain JSON."""


class Unreadable(Exception):
    """A file that is not a record this version can read; says which and why."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path, self.why = path, why


class Attempt(NamedTuple):
    """One run directory and, once it has a record, how it ended and what that answer holds for."""

    folder: Path
    repeat: int
    attempt: int
    outcome: OutcomeKind | None = None
    reason: str = ""
    machine: str = ""
    environment_id: str | None = None


def unwritable(folder: Path, error: OSError) -> UserError:
    """Return what to tell a user whose results cannot be written: a full disk, a folder of somebody else's."""
    rule = f"cannot be written to ({error.strerror})"
    return UserError(str(folder), rule, "free some space or choose another results folder")


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


def fill(path: Path, content: bytes) -> bool:
    """Write `content` to `path` whole, into the blocks reserved for it if any: that needs no free space.

    A file that is there stays as it is: of two who write the same attempt's record, the first is right. Return whether
    it was written.
    """
    reserved, own = _reserved(path), path.with_name(f".{path.name}.{secrets.token_hex(4)}.reserved")
    with contextlib.suppress(FileNotFoundError):
        reserved.rename(own)  # from here on nobody else writes into it
    try:
        if not own.exists() or own.stat().st_size < len(content):
            write_atomically(own, content)
        else:
            with own.open("r+b") as file:
                file.write(content)
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
        os.link(own, path)
    except FileExistsError:
        return False
    finally:
        own.unlink(missing_ok=True)
    return True


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
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(config_folder):
            if match := _ATTEMPT.fullmatch(entry.name):
                found.append(_glance(Attempt(Path(entry.path), int(match[1]), int(match[2]))))
    return sorted(found, key=lambda a: (a.repeat, a.attempt))


def _glance(attempt: Attempt) -> Attempt:
    """Add what an attempt's record says of its end, without decoding the rest: thousands are looked at in a second."""
    try:
        plain = _beginning(attempt.folder / RECORD)
        return attempt._replace(
            outcome=plain["outcome"]["kind"],
            reason=plain["outcome"]["reason"],
            machine=plain["circumstance"]["machine"]["name"],
            environment_id=(plain["environment"] or {}).get("environment_id"),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return attempt


def _beginning(path: Path) -> dict[str, Any]:
    """Return a record up to its observations at least; those are most of it and come last."""
    with path.open("rb") as file:
        plain: dict[str, Any] = pydantic_core.from_json(file.read(_BEGINNING_BYTES), allow_partial=True)
        if "observations" not in plain:
            file.seek(0)
            plain = pydantic_core.from_json(file.read())
    return plain


def answered(
    config_folder: Path, repeat: int, machine: str, environment_id: str | None, accept: Container[str] = FINAL
) -> Attempt | None:
    """Return the attempt that answers this point for good on this machine in this environment class, if any.

    `environment_id` None accepts every class: where it cannot be known, the worker asks again when it starts. An answer
    that never met an environment (`pruned`, `infeasible`) holds for all.
    """
    for attempt in attempts(config_folder):
        same = (attempt.repeat, attempt.machine) == (repeat, machine)
        holds = environment_id is None or attempt.environment_id in (None, environment_id)
        if same and holds and attempt.outcome in accept:
            return attempt
    return None


def claim(config_folder: Path, repeat: int | None) -> Attempt:
    """Make the next attempt's folder for `repeat`, or the first of a repeat that nobody has started if that is None; it
    belongs to the caller alone."""
    config_folder.mkdir(parents=True, exist_ok=True)
    used = [match for path in config_folder.iterdir() if (match := _ATTEMPT.fullmatch(path.name))]
    new_repeat = repeat is None
    if repeat is None:
        repeat, attempt = max((int(match[1]) for match in used), default=-1) + 1, 0
    else:
        attempt = max((int(match[2]) for match in used if int(match[1]) == repeat), default=-1) + 1
    while True:
        folder = config_folder / f"{repeat}.{attempt}"
        try:
            folder.mkdir()
        except FileExistsError:  # somebody else was faster
            repeat, attempt = (repeat + 1, 0) if new_repeat else (repeat, attempt + 1)
        else:
            return Attempt(folder, repeat, attempt)


def open_attempt(
    config_folder: Path, spec: RunSpec, circumstance: Circumstance, *, new_repeat: bool = False
) -> Attempt:
    """Claim the next attempt and write what it is to do; its record has room reserved from now on.

    `circumstance` gives the repeat, unless a new one is asked for; its attempt number is the one that was claimed.
    """
    attempt = claim(config_folder, None if new_repeat else circumstance.repeat)
    numbers = {"repeat": attempt.repeat, "attempt": attempt.attempt}
    ranks, steps = spec.world_size, spec.measure.warmup_max_steps + spec.measure.max_steps
    try:
        reserve(attempt.folder / RECORD, min(512 * 1024 + 2048 * ranks + 128 * steps, _RESERVE_LIMIT_BYTES))
        reserve(attempt.folder / STEPS, min(64 * 1024 + 64 * ranks * steps, _RESERVE_LIMIT_BYTES))
        write_json(attempt.folder / SPEC, spec)
        write_json(attempt.folder / CIRCUMSTANCE, circumstance.model_copy(update=numbers))
    except (OSError, UserError):
        shutil.rmtree(attempt.folder, ignore_errors=True)  # nobody has begun anything in it
        raise
    return attempt


def conclude(folder: Path, outcome: Outcome, evidence: Evidence = "measured") -> RunRecord:
    """Return the record of an attempt, writing one with `outcome` if no rank left any: where the workers could not,
    whoever watched them says how it ended. The `evidence` of a point that never ran may be a prediction."""
    path = folder / RECORD
    if not path.exists():
        environment: Environment | None = None
        with contextlib.suppress(OSError, ValidationError):  # it failed before it knew where it was
            environment = Environment.model_validate_json((folder / ENVIRONMENT).read_bytes())
        spec = RunSpec.model_validate_json((folder / SPEC).read_bytes())
        record = RunRecord(
            config_id=config_id(spec),
            evidence=evidence,
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
    with contextlib.suppress(ValidationError):
        record = RunRecord.model_validate_json(content)  # far quicker than through plain values
        if record.schema_version == SCHEMA_VERSION and "schema_version" in record.model_fields_set:
            return record
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
