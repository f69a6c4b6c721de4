"""What the folder of a study shows: every attempt, those without a record a little closer, and every job."""

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import AwareDatetime, BaseModel, ValidationError

from bench import store
from bench.record import Circumstance
from bench.spec import RunSpec
from bench.sweep import asked, exclusions, jobs
from bench.sweep.asked import Key

FRESH_S = 90.0
"""A heartbeat is written every few seconds; a file system that stalls for a while must not look like a death."""
_NO_POINTS = (asked.FOLDER, jobs.FOLDER, exclusions.FOLDER)


class Rank(BaseModel):
    """What a heartbeat says of one rank."""

    phase: str = ""
    step: int = -1  # outside the loop


class Heartbeat(BaseModel):
    """What an attempt last said of itself; the rest of the file is for people."""

    at: AwareDatetime
    host: str
    supervisor: int
    ranks: tuple[Rank, ...] = ()


class Place(BaseModel):
    """By whom an attempt was started, from the launcher's options in its circumstances."""

    job: str = ""  # empty for one that no scheduler started
    task: int | None = None
    restart: int = 0


class Open(NamedTuple):
    """An attempt without a record: under way, or dead and not yet reconciled."""

    key: Key
    attempt: store.Attempt
    job: str  # empty for one that no scheduler started
    task: int | None
    restart: int
    heartbeat: Heartbeat | None
    seen_at: float  # seconds since the epoch: its last sign of life

    @property
    def fresh(self) -> bool:
        return time.time() - self.seen_at < FRESH_S

    @property
    def dead_here(self) -> bool:
        """Whether its supervisor ran on this machine and is gone."""
        if not self.heartbeat or self.heartbeat.host != os.uname().nodename:
            return False
        return not Path(f"/proc/{self.heartbeat.supervisor}").exists()

    def doing(self) -> str:
        """Return what it does, and how long ago it said so."""
        if not self.heartbeat or not self.heartbeat.ranks:
            return "starting"
        behind = min(self.heartbeat.ranks, key=lambda rank: rank.step)
        step = f" step {behind.step}" if behind.step >= 0 else ""
        return f"{behind.phase}{step}, {time.time() - self.seen_at:.0f} s ago"


class Survey(NamedTuple):
    """A study's folder at one moment."""

    folder: Path
    tried: dict[str, list[store.Attempt]]  # by config_id
    open: dict[Key, list[Open]]
    jobs: list[jobs.Submitted]
    unreadable: list[store.Unreadable]  # files that count as not there, and folders

    def of(self, key: Key) -> list[store.Attempt]:
        """Return the attempts at a point that have a record, oldest first."""
        tried = self.tried.get(key.config_id, ())
        return [a for a in tried if a.outcome and (a.repeat, a.machine) == (key.repeat, key.machine)]


def survey(folder: Path) -> Survey:
    """Look at everything in a study's folder once."""
    submitted, unreadable = jobs.submitted(folder)
    seen = Survey(folder, {}, {}, submitted, unreadable)
    for entry in os.scandir(folder):
        if entry.is_dir() and entry.name not in _NO_POINTS:
            try:
                seen.tried[entry.name] = store.attempts(Path(entry.path))
            except OSError as error:
                seen.unreadable.append(store.Unreadable(Path(entry.path), error.strerror or str(error)))
    for config_id, attempts in seen.tried.items():
        for attempt in attempts:
            if attempt.outcome is None:
                _add(seen, config_id, attempt)
    return seen


def _add(seen: Survey, config_id: str, attempt: store.Attempt) -> None:
    """Add an attempt without a record that can be read."""
    if attempt.unreadable:
        seen.unreadable.append(store.Unreadable(attempt.folder / store.RECORD, attempt.unreadable))
        return
    try:
        found = _open(config_id, attempt)
        seen.open.setdefault(found.key, []).append(found)
        beat = attempt.folder / store.HEARTBEAT
        if found.heartbeat is None and beat.exists():
            seen.unreadable.append(store.Unreadable(beat, "not a heartbeat"))
    except FileNotFoundError:
        pass  # it was only just claimed
    except store.Unreadable as error:
        seen.unreadable.append(error)


def look(config_id: str, attempt: store.Attempt) -> Open | None:
    """Return what an attempt without a record says of itself; None for one that was only just claimed, or that cannot
    be read."""
    if attempt.unreadable:
        return None
    with contextlib.suppress(FileNotFoundError, store.Unreadable):
        return _open(config_id, attempt)
    return None


def _open(config_id: str, attempt: store.Attempt) -> Open:
    """Return what an attempt without a record says of itself; FileNotFoundError or Unreadable where its record could
    not be concluded from that."""
    path = attempt.folder / store.CIRCUMSTANCE
    circumstance = store.read_value(path, Circumstance)
    store.read_value(attempt.folder / store.SPEC, RunSpec)
    try:
        place = Place.model_validate(circumstance.launcher)
    except ValidationError as error:
        raise store.Unreadable(path, "launcher: no job, task and restart") from error
    key = Key(config_id, circumstance.machine.name, attempt.repeat)
    beat = heartbeat(attempt.folder)
    seen_at = beat.at.timestamp() if beat else path.stat().st_mtime
    return Open(key, attempt, place.job, place.task, place.restart, beat, seen_at)


def heartbeat(folder: Path) -> Heartbeat | None:
    """Return what an attempt last said of itself; None where it has said nothing that can be read."""
    with contextlib.suppress(FileNotFoundError, store.Unreadable):
        return store.read_value(folder / store.HEARTBEAT, Heartbeat)
    return None


def busy_elsewhere(config_folder: Path, key: Key, before: int | None = None) -> Open | None:
    """Return another attempt at a point that is under way; of those claimed `before` ours if that is given."""
    for attempt in store.attempts(config_folder):
        if attempt.outcome is None and attempt.repeat == key.repeat and (before is None or attempt.attempt < before):
            found = look(key.config_id, attempt)
            if found and found.key == key and found.fresh and not found.dead_here:
                return found
    return None


def spent_node_hours(submitted: Sequence[jobs.Submitted]) -> float:
    """Return the node-hours that jobs have had so far, failures included."""
    seconds = 0.0
    for job in submitted:
        for _, allocation in jobs.allocations(job.folder):
            seconds += allocation.nodes * ((allocation.ended_at or time.time()) - allocation.began_at)
    return seconds / 3600
