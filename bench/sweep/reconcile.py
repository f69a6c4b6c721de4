"""What became of an attempt that left no record, by what the scheduler and the attempt itself last said. Pure."""

from pathlib import Path
from typing import Any, NamedTuple

import pydantic_core

from bench import files, store
from bench.record import Outcome, OutcomeKind
from bench.scheduling import JobState


class LeftBehind(NamedTuple):
    """What an attempt left behind instead of a record: that it was interrupted, and where it last was."""

    interrupted: dict[str, Any] | None
    heartbeat: dict[str, Any] | None

    @classmethod
    def read(cls, folder: Path) -> "LeftBehind":
        return cls(_read_json(folder / store.INTERRUPTED), _read_json(folder / store.HEARTBEAT))


def reconcile_outcome(left_behind: LeftBehind, ending: JobState | None, *, restarted: bool) -> Outcome:
    """Decide how an attempt ended whose job has ended, or has been put back into the queue (`restarted`).

    `ending` is how the scheduler says that the job ended; None where it no longer knows.
    """
    kind, reason = _decide_kind(left_behind, ending, restarted)
    evidence: dict[str, Any] = {}
    if ending:
        evidence["scheduler"] = {"state": ending.state, "words": ending.words, "source": ending.source}
        if ending.exit:
            evidence["scheduler"]["exit"] = ending.exit
    if left_behind.interrupted:
        evidence["interrupted"] = left_behind.interrupted
    if left_behind.heartbeat:
        evidence["last_heartbeat"] = left_behind.heartbeat
    return Outcome(kind=kind, reason=reason, evidence=evidence)


def reconcile_local_outcome(left_behind: LeftBehind) -> Outcome:
    """Decide how an attempt ended that no scheduler started, and whose supervisor is gone."""
    interrupted, heartbeat = left_behind
    evidence = {name: value for name, value in (("interrupted", interrupted), ("last_heartbeat", heartbeat)) if value}
    if interrupted:
        by = interrupted.get("signal", "a signal")
        return Outcome(kind="cancelled", reason=f"interrupted by {by}, and left no record", evidence=evidence)
    who, at = "", ""
    if heartbeat:
        who = f", process {heartbeat.get('supervisor')} on {heartbeat.get('host')},"
        at = f"; it was last heard of at {heartbeat.get('at')}"
    reason = f"its supervisor{who} died and left no record{at}; run.log may tell more"
    return Outcome(kind="error", reason=reason, evidence=evidence)


def _decide_kind(left_behind: LeftBehind, ending: JobState | None, restarted: bool) -> tuple[OutcomeKind, str]:
    if restarted:
        if left_behind.interrupted:
            return "preempted", "the job was asked to end and put back into the queue"
        return "node_failure", "the job was put back into the queue with no time to say a word, as when a node fails"
    if ending and ending.outcome not in (None, "error"):
        return ending.outcome, ending.why
    if left_behind.interrupted and _is_warned(left_behind.interrupted):
        return "timeout", "the scheduler gave warning that the time of its job was over"
    if left_behind.interrupted and ending and ending.outcome:
        name = left_behind.interrupted.get("signal", "a signal")
        return "error", f"{_describe_ending(ending)}, and {name} ended the rest of it; its log may tell more"
    if left_behind.interrupted:
        by = left_behind.interrupted.get("signal", "a signal")
        return "cancelled", f"interrupted by {by}, and the scheduler does not say why"
    if ending:
        return "error", f"{_describe_ending(ending)} and left no record; its log may tell more"
    return "error", "no record, and the scheduler no longer knows the job"


def _describe_ending(ending: JobState) -> str:
    return f"the job ended as {ending.state}" + (f" ({ending.exit})" if ending.exit else "")


def _is_warned(interrupted: dict[str, Any]) -> bool:
    """Whether a run was asked to end when its job's time was almost over. The warning may come a minute early."""
    left_s, warning_s = interrupted.get("left_s"), interrupted.get("warning_s")
    return isinstance(left_s, int | float) and isinstance(warning_s, int | float) and left_s <= warning_s + 60


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return what a file says; None where it is not there or says nothing that can be read."""
    try:
        plain = pydantic_core.from_json(files.read_regular(path), allow_inf_nan=False)
    except (OSError, ValueError):
        return None
    return plain if isinstance(plain, dict) else None
