"""Results folders: `<runs>/<study>/<config_id>/<repeat>.<attempt>/`, one per attempt, append-only.

Files appear whole (temporary file, then rename), and a used folder is never written again: claiming one is an
exclusive `mkdir`, so that two processes cannot own the same attempt.
"""

import contextlib
import functools
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import pydantic
import pydantic_core
from pydantic import BaseModel, ValidationError

from bench.core import files
from bench.core.errors import UserError
from bench.core.invariants import find_broken_rule
from bench.core.migrations import migrate
from bench.core.private import mask_tokens
from bench.core.record import SCHEMA_VERSION, Circumstance, Environment, Evidence, Outcome, OutcomeKind, RunRecord
from bench.core.spec import AdaptiveMeasure, RunSpec, config_id

RECORD, SPEC, CIRCUMSTANCE, ENVIRONMENT = "record.json", "spec.json", "circumstance.json", "environment.json"
STEPS, LOG, HEARTBEAT, RENDEZVOUS = "steps.parquet", "run.log", "heartbeat.json", "rendezvous.json"
INTERRUPTED = "interrupted.json"
UNINSPECTED = "the run ended before its untimed steps did"
"""What a record says until they are made: a run that fails in them has been measured."""

PAUSED = "paused_s"
"""In the evidence of an outcome: seconds for which the attempt was paused. Its step times mean nothing then."""

_ATTEMPT = re.compile(r"(\d+)\.(\d+)")
_BEGINNING_BYTES = 8192
_END_BYTES = 256  # of a record, which ended with its drill before its outcome said so
_FAULT_SEEN = "drill at the end"
_NO_RECORD = "not a zeroscale record"
_OUTCOMES = frozenset(get_args(OutcomeKind))
_RESERVE_LIMIT_BYTES = 4 * 2**20  # a longer series has to find its space when it is written
_USUAL_STEPS = 1000  # of a window of 60 s with steps of 60 ms

_SPEC_BEGIN, _SPEC_END = b'\n "spec": {', b"\n },"
_SPEC_READ = secrets.token_hex(16).encode()
_WithoutSpec = pydantic.create_model("_WithoutSpec", __base__=RunRecord, spec=(str, ...))
_OF_TODAY = re.compile(rb'\s*\{\s*"schema_version"\s*:\s*%d\s*,' % SCHEMA_VERSION)


_Value = TypeVar("_Value", bound=BaseModel)


class Unreadable(UserError):
    """A file that does not hold what its name says, as this version reads it; says which and why."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(str(path), why)
        self.path, self.why = path, why


class RunAttempt(NamedTuple):
    """One run directory and, once it has a record, how it ended and what that answer holds for; a record that cannot be
    read is no answer."""

    folder: Path
    repeat: int
    attempt: int
    outcome: OutcomeKind | None = None
    reason: str = ""
    machine: str = ""
    environment_id: str | None = None
    unreadable: str = ""  # why its record cannot be read
    job: str = ""  # whose allocation it was made in; empty for one that no scheduler started
    drill: bool = False  # a fault was injected, so that it measured nothing
    disk_full: bool = False  # it failed for want of room for its results, which is not the point's fault
    paused_s: float = 0.0  # it was suspended or stopped for so long


def build_unwritable_error(folder: Path, error: OSError) -> UserError:
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
    """Allocate `size_bytes` on the disk for the file that `write_reserved` will write at `path`, so that a disk that
    fills up during the run cannot lose it. Raise UserError where there is no such space now."""
    reserved = _build_reserved_path(path)
    try:
        with reserved.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, size_bytes)
    except OSError as error:
        reserved.unlink(missing_ok=True)
        why = f"cannot reserve {size_bytes} bytes for the record ({error.strerror})"
        raise UserError(str(path.parent), why, "free some space or choose another results folder") from error


def write_reserved(path: Path, content: bytes) -> bool:
    """Write `content` to `path` whole, into the blocks reserved for it if any: that needs no free space.

    A file that is there stays as it is: of two who write the same attempt's record, the first is right. Return whether
    it was written.
    """
    reserved, own = _build_reserved_path(path), path.with_name(f".{path.name}.{secrets.token_hex(4)}.reserved")
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
    except OSError:
        own.unlink(missing_ok=True)  # its blocks may be what others need
        raise
    named = _link_name(own, path)
    own.unlink(missing_ok=True)
    _sync_names(path.parent)
    return named


def _sync_names(folder: Path) -> None:
    """Have the disk hold a folder's names, as it holds what is in its files, in case the machine stops now; some file
    systems do that by themselves and refuse to be asked."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _link_name(own: Path, path: Path) -> bool:
    """Give a file its name unless another has it; return whether it has it now."""
    try:
        os.link(own, path)
    except FileExistsError:
        # a network file system that answers a call it has carried out twice means the name that it gave itself
        return path.exists() and own.samefile(path)
    except OSError:  # a file system without hard links, or without room for another name
        if not _may_take_name(path):
            return False
        own.replace(path)
    return True


def _may_take_name(path: Path) -> bool:
    """Whether a name was free; it is taken now where an empty file can be made."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return False
    except OSError:
        return not path.exists()
    return True


def release_reserved(folder: Path) -> None:
    """Give back what was reserved in `folder` and not filled."""
    for leftover in folder.glob(".*.reserved"):
        leftover.unlink(missing_ok=True)


def _build_reserved_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserved")


def to_json(value: BaseModel) -> bytes:
    """Return a value as indented JSON text, with tokens masked: libraries print them, and name them in exceptions."""
    return mask_tokens(value.model_dump_json(indent=1, by_alias=True).encode()) + b"\n"


def list_attempts(config_folder: Path) -> list[RunAttempt]:
    """List the attempts at one point in order of repeat and attempt; a record that cannot be read has no outcome."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(config_folder):
            if match := _ATTEMPT.fullmatch(entry.name):
                found.append(_read_header(RunAttempt(Path(entry.path), int(match[1]), int(match[2]))))
    return sorted(found, key=lambda a: (a.repeat, a.attempt))


def _read_header(attempt: RunAttempt) -> RunAttempt:
    """Add what an attempt's record says of its end, without decoding the rest: thousands are looked at in a second."""
    try:
        return attempt._replace(**_parse_header(_read_beginning(attempt.folder / RECORD)))
    except FileNotFoundError:
        return attempt
    except OSError as error:
        return attempt._replace(unreadable=error.strerror or str(error))
    except (ValueError, KeyError, TypeError, AttributeError):
        return attempt._replace(unreadable=_NO_RECORD)


def _parse_header(plain: dict[str, Any]) -> dict[str, Any]:
    """Return what a record says of its end and of its worth; KeyError or TypeError where that cannot be meant."""
    outcome, environment = plain["outcome"], plain["environment"]
    header = {
        "outcome": outcome["kind"],
        "reason": outcome["reason"],
        "machine": plain["circumstance"]["machine"]["name"],
        "environment_id": environment["environment_id"] if environment is not None else "",
        "job": (plain["circumstance"].get("launcher") or {}).get("job") or "",
    }
    if not all(isinstance(text, str) for text in header.values()) or header["outcome"] not in _OUTCOMES:
        raise TypeError("no text, or no outcome")
    if header["outcome"] == "ok" and plain["observations"] is None:
        raise TypeError("ended well, and observed nothing")
    evidence, observed = outcome.get("evidence") or {}, plain["observations"] or {}
    drill = bool(evidence.get("drill") or observed.get("drill") or plain.get(_FAULT_SEEN))
    marks = {
        "drill": drill,
        "disk_full": bool(evidence.get("disk_full")),
        "paused_s": float(evidence.get(PAUSED) or 0.0),
    }
    return header | marks | {"environment_id": header["environment_id"] or None}


def _read_beginning(path: Path) -> dict[str, Any]:
    """Return a record up to its observations at least; those are most of it and come last.

    The rest is not looked at, but it is there: a file that does not end as records do is decoded to its end, which
    raises ValueError for a torn one.
    """
    with open(path, "rb", buffering=0, opener=files.open_regular) as file:
        content = file.read(_BEGINNING_BYTES)
        if len(content) == _BEGINNING_BYTES:
            file.seek(-_END_BYTES, os.SEEK_END)
            end = file.read()
            if end.rstrip().endswith(b"\n}"):  # indented: what ends within it does not begin a line
                plain: dict[str, Any] = pydantic_core.from_json(content, allow_partial=True)
                if "observations" in plain:
                    return plain | {_FAULT_SEEN: b'\n  "drill": "' in end}
            file.seek(0)
            content = file.read()
    whole: dict[str, Any] = pydantic_core.from_json(content)
    return whole


def create_attempt(config_folder: Path, repeat: int | None) -> RunAttempt:
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
            return RunAttempt(folder, repeat, attempt)


def open_attempt(
    config_folder: Path, spec: RunSpec, circumstance: Circumstance, *, new_repeat: bool = False, claim: bytes = b""
) -> RunAttempt:
    """Claim the next attempt and write what it is to do; its record has room reserved from now on.

    `circumstance` gives the repeat, unless a new one is asked for; its attempt number is the one that was claimed.
    `claim` is the first heartbeat: it names the process that claims the attempt until its supervisor writes one.
    """
    if isinstance(spec.measure, AdaptiveMeasure):
        rule = "is the protocol of an older version, whose windows ended by what their steps showed"
        raise UserError("measure", rule, "plan the study again, in a new results folder")
    attempt = create_attempt(config_folder, None if new_repeat else circumstance.repeat)
    numbers = {"repeat": attempt.repeat, "attempt": attempt.attempt}
    ranks, steps = spec.world_size, spec.measure.warmup_steps + max(spec.measure.min_steps, _USUAL_STEPS)
    try:
        reserve(attempt.folder / RECORD, min(512 * 1024 + 2048 * ranks + 128 * steps, _RESERVE_LIMIT_BYTES))
        reserve(attempt.folder / STEPS, min(64 * 1024 + 64 * ranks * steps, _RESERVE_LIMIT_BYTES))
        write_json(attempt.folder / SPEC, spec)
        if claim:  # before the circumstance, without which an attempt does not count
            write_atomically(attempt.folder / HEARTBEAT, claim)
        write_json(attempt.folder / CIRCUMSTANCE, circumstance.model_copy(update=numbers))
    except (OSError, UserError):
        shutil.rmtree(attempt.folder, ignore_errors=True)  # nobody has begun anything in it
        raise
    return attempt


def drop_claim(folder: Path) -> None:
    """Remove an attempt's folder that was claimed by a process that was killed before it had said for what. One that
    holds anything else than such a process writes is left as it is."""
    with contextlib.suppress(OSError):
        names = {path.name for path in folder.iterdir()}
        if all(name in (SPEC, HEARTBEAT) or name.startswith(".") for name in names):
            shutil.rmtree(folder)


def finalize(folder: Path, outcome: Outcome, evidence: Evidence = "measured", *, paused_s: float = 0.0) -> RunRecord:
    """Return the record of an attempt, writing one with `outcome` if no rank left any: where the workers could not,
    whoever watched them says how it ended. The `evidence` of a point that never ran may be a prediction. A record that
    a rank wrote gets `paused_s`, the seconds for which the run was paused while it made steps."""
    path = folder / RECORD
    if not path.exists():
        environment: Environment | None = None
        with contextlib.suppress(OSError, Unreadable):  # it failed before it knew where it was
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
    """Return the record at `path`, with what only the supervisor knows: why a run was lost after its window, and how
    long it was paused."""
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
    with contextlib.suppress(OSError):  # it says already that there is none
        write_json(path, record)
    return record


def find_records(paths: Iterable[Path]) -> Iterator[Path]:
    """Yield every `record.json` at or below `paths`, those in archives too, sorted within each; UserError for a path
    that is not there."""
    for path in paths:
        if not files.exists(path):
            raise UserError(str(path), "no such file or folder", "give a results folder, e.g. results/runs/smoke")
        if files.split_archive(path)[0]:
            yield from _find_packed(path, files.list_members)
        elif path.is_file():
            yield path
        else:
            archives = filter(Path.is_file, path.rglob(f"*{files.ARCHIVE}"))
            packed = (found for one in archives for found in _find_packed(one, files.list_packed))
            yield from sorted([*path.rglob(RECORD), *packed])


def _find_packed(path: Path, list_files: Callable[[Path], Iterable[str]]) -> list[Path]:
    try:
        names = list(list_files(path))
    except OSError:
        return [path]  # reading it says why nothing can be found in it
    return [path / name for name in names if name.rpartition("/")[2] in (RECORD, "")]


def read_record(path: Path) -> RunRecord:
    """Read a record of this or an older schema version; raise Unreadable for anything else."""
    content = _read_content(path)
    try:
        if _OF_TODAY.match(content):
            record = _validate(content)
        else:
            record = RunRecord.model_validate(_migrate_content(content, path))
    except ValidationError as error:
        raise Unreadable(path, _format_first_error(error)) from error
    if rule := find_broken_rule(record):
        raise Unreadable(path, rule)
    return record


def _validate(content: bytes) -> RunRecord:
    """Return the record that a text of today's version holds; ValidationError for none.

    The text of a spec that was read before is not read again, for repeats of a configuration lie beside each other. It
    is found by its indentation, for a line break cannot stand within a JSON string, and a word that nobody can know is
    read in its place: where that is not what the record has as its `spec`, all of it is read.
    """
    begin = content.find(_SPEC_BEGIN) + len(_SPEC_BEGIN) - 1
    end = content.find(_SPEC_END, begin) + len(_SPEC_END) - 1
    if len(_SPEC_BEGIN) <= begin < end:
        with contextlib.suppress(ValidationError):
            spec = _read_spec(content[begin:end])
            rest = _WithoutSpec.model_validate_json(b'%b"%b"%b' % (content[:begin], _SPEC_READ, content[end:]))
            if vars(rest)["spec"] == _SPEC_READ.decode():
                return RunRecord.model_construct(rest.model_fields_set, **{**vars(rest), "spec": spec})
    return RunRecord.model_validate_json(content)


@functools.lru_cache(maxsize=1)
def _read_spec(text: bytes) -> RunSpec:
    return RunSpec.model_validate_json(text)


def read_value(path: Path, kind: type[_Value]) -> _Value:
    """Read what stands beside a record, such as its spec; raise Unreadable for anything else."""
    try:
        return kind.model_validate_json(_read_content(path))
    except ValidationError as error:
        raise Unreadable(path, _format_first_error(error)) from error


def _read_content(path: Path) -> bytes:
    try:
        return files.read_regular(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unreadable(path, error.strerror or str(error)) from error


def _format_first_error(error: ValidationError) -> str:
    """Return the first thing that is wrong, and where."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    return f"{where}: {first['msg']}" if where else first["msg"]


def _migrate_content(content: bytes, path: Path) -> dict[str, Any]:
    """Return a record as plain values of today's version."""
    try:
        plain: dict[str, Any] = pydantic_core.from_json(content)
        version = plain["schema_version"]
        if type(version) is not int:  # True would be 1
            raise TypeError(version)
        if version > SCHEMA_VERSION:
            raise Unreadable(path, f"schema version {version} is newer than {SCHEMA_VERSION}; upgrade zeroscale")
        return migrate(plain, path.with_name(STEPS))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise Unreadable(path, _NO_RECORD) from error
