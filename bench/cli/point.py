"""Run one point here, follow it, and see that it ends: what `run` and `sweep` have in common."""

import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import launchers, store
from bench.cli import asking
from bench.config import Request
from bench.record import Outcome, RunRecord
from bench.spec import config_id
from bench.study import Study

_POLL_S = 0.1


def measure(
    asked: Request, results: Path, study: Study, repeat: int, overrides: tuple[str, ...], follow: Callable[[str], None]
) -> tuple[Path, RunRecord]:
    """Run one attempt to its end; return its folder and its record. `follow` hears what it is doing.

    Ctrl-C ends the attempt in good order, with a record `cancelled`, and is then raised again.
    """
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    circumstance = asking.circumstance(asked, study, repeat, overrides, started_at)
    folder = store.open_attempt(results / study.name / config_id(asked.spec), asked.spec, circumstance).folder
    launcher = launchers.load(asked.launcher)
    work = launchers.Work(config_id(asked.spec), folder, "bench.supervisor", (str(folder),))
    handle = launcher.submit(launcher.plan(work, asked.launcher_options))
    interrupted = False
    while not launcher.poll(handle):
        try:
            time.sleep(_POLL_S)
            follow(_progress(folder))
        except KeyboardInterrupt:
            if not interrupted:
                print("zeroscale: ending the run in good order …", file=sys.stderr)
            interrupted = True
            launcher.cancel(handle)
    if interrupted:
        raise KeyboardInterrupt
    reason = "its supervisor died and left no record; run.log may tell more"
    return folder, store.conclude(folder, Outcome(kind="error", reason=reason))


def _progress(folder: Path) -> str:
    """Return what the attempt says it is doing, from its heartbeat."""
    try:
        beat: dict[str, Any] = json.loads((folder / store.HEARTBEAT).read_text())
        furthest_behind = min(beat["ranks"], key=lambda rank: rank["step"])
    except (OSError, ValueError):
        return "starting"
    phase, step = furthest_behind["phase"], furthest_behind["step"]
    return f"{phase} {step}" if step >= 0 else str(phase)
