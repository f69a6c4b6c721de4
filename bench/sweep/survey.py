"""What the folder of a study shows: every attempt, those without a record a little closer, and every job."""

import json
import os
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from bench import store
from bench.sweep import asked, exclusions, jobs
from bench.sweep.asked import Key

FRESH_S = 90.0
"""A heartbeat is written every few seconds; a file system that stalls for a while must not look like a death."""
_NO_POINTS = (asked.FOLDER, jobs.FOLDER, exclusions.FOLDER)


class Open(NamedTuple):
    """An attempt without a record: under way, or dead and not yet reconciled."""

    key: Key
    attempt: store.Attempt
    job: str  # empty for one that no scheduler started
    task: int | None
    restart: int
    heartbeat: dict[str, Any] | None
    seen_at: float  # seconds since the epoch: its last sign of life

    @property
    def fresh(self) -> bool:
        return time.time() - self.seen_at < FRESH_S

    @property
    def dead_here(self) -> bool:
        """Whether its supervisor ran on this machine and is gone."""
        if not self.heartbeat or self.heartbeat.get("host") != os.uname().nodename:
            return False
        return not Path(f"/proc/{self.heartbeat['supervisor']}").exists()

    def doing(self) -> str:
        """Return what it does, and how long ago it said so."""
        if not self.heartbeat or not self.heartbeat.get("ranks"):
            return "starting"
        behind = min(self.heartbeat["ranks"], key=lambda rank: rank["step"])
        step = f" step {behind['step']}" if behind["step"] >= 0 else ""
        return f"{behind['phase']}{step}, {time.time() - self.seen_at:.0f} s ago"


class Survey(NamedTuple):
    """A study's folder at one moment."""

    folder: Path
    tried: dict[str, list[store.Attempt]]  # by config_id
    open: dict[Key, list[Open]]
    jobs: list[jobs.Submitted]

    def of(self, key: Key) -> list[store.Attempt]:
        """Return the attempts at a point that have a record, oldest first."""
        tried = self.tried.get(key.config_id, ())
        return [a for a in tried if a.outcome and (a.repeat, a.machine) == (key.repeat, key.machine)]


def survey(folder: Path) -> Survey:
    """Look at everything in a study's folder once."""
    tried: dict[str, list[store.Attempt]] = {}
    unfinished: dict[Key, list[Open]] = {}
    for entry in os.scandir(folder):
        if entry.is_dir() and entry.name not in _NO_POINTS:
            tried[entry.name] = store.attempts(Path(entry.path))
    for config_id, attempts in tried.items():
        for attempt in attempts:
            if attempt.outcome is None and (found := look(config_id, attempt)):
                unfinished.setdefault(found.key, []).append(found)
    return Survey(folder, tried, unfinished, jobs.submitted(folder))


def look(config_id: str, attempt: store.Attempt) -> Open | None:
    """Return what an attempt without a record says of itself; None for one that was only just claimed."""
    try:
        plain = json.loads((attempt.folder / store.CIRCUMSTANCE).read_bytes())
        launcher = plain["launcher"]
        key = Key(config_id, plain["machine"]["name"], attempt.repeat)
        heartbeat, seen_at = None, (attempt.folder / store.CIRCUMSTANCE).stat().st_mtime
    except (OSError, ValueError, KeyError):
        return None
    try:
        heartbeat = json.loads((attempt.folder / store.HEARTBEAT).read_bytes())
        seen_at = datetime.fromisoformat(heartbeat["at"]).timestamp()
    except (OSError, ValueError, KeyError):
        pass  # it has not said a word yet
    task, restart = launcher.get("task"), launcher.get("restart", 0)
    return Open(key, attempt, launcher.get("job", ""), task, restart, heartbeat, seen_at)


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
