"""From typed evidence to an outcome: pure, so that every case is a line in a test."""

import signal
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from bench.record import Outcome, OutcomeKind

Stop = Literal["cancelled", "timeout", "hang"]


class Ending(NamedTuple):
    """How one rank ended, and where it was when it last said so."""

    rank: int
    exit_code: int | None  # negative: killed by that signal; None: still running
    stopped: bool  # by the supervisor, so its end is no evidence
    failure: dict[str, Any] | None  # what it said of its exception
    phase: str
    step: int

    @property
    def where(self) -> str:
        return f"in {self.phase}" + (f" at step {self.step}" if self.step >= 0 else "")


# A lost peer makes the others fail too: what can be a consequence stands behind what cannot.
_ORDER: tuple[OutcomeKind, ...] = ("oom", "host_oom", "error", "comm_error")


def verdict(endings: Sequence[Ending], stop: Stop | None, why_stopped: str, oom_kills: int) -> Outcome:
    """Decide the outcome of a run that left no record.

    `stop` is why the supervisor ended the ranks, if it did so before any rank was lost; `oom_kills` is how many
    processes the kernel's out-of-memory killer ended meanwhile on this host.
    """
    lost = [ending for ending in endings if not ending.stopped and ending.exit_code != 0]
    evidence: dict[str, Any] = {"ranks": [_plain(ending) for ending in lost]}
    if stop:
        return Outcome(kind=stop, reason=why_stopped, evidence=evidence)
    if not lost:
        return Outcome(kind="error", reason="every rank ended, and none wrote a record", evidence=evidence)
    cause = min(lost, key=lambda ending: _rank_of_cause(ending, oom_kills))
    kind = _kind(cause, oom_kills)
    if cause.failure:
        evidence["traceback"] = cause.failure["traceback"]
    if oom_kills:
        evidence["oom_kills"] = oom_kills
    return Outcome(kind=kind, reason=_reason(cause, oom_kills), evidence=evidence)


def _kind(ending: Ending, oom_kills: int) -> OutcomeKind:
    if ending.failure:
        kind: OutcomeKind = ending.failure["outcome"]
        return kind
    killed = ending.exit_code == -signal.SIGKILL
    return "host_oom" if killed and oom_kills else "error"


def _rank_of_cause(ending: Ending, oom_kills: int) -> tuple[int, bool]:
    # Killed from outside comes before an exception of the same kind, which may be the echo of a lost peer.
    return _ORDER.index(_kind(ending, oom_kills)), ending.failure is not None


def _reason(ending: Ending, oom_kills: int) -> str:
    if ending.failure:
        message = str(ending.failure["message"]).strip().splitlines() or [""]
        return f"rank {ending.rank} {ending.where}: {ending.failure['exception']}: {message[0][:300]}"
    code = ending.exit_code
    if code is not None and code < 0:
        killer = " by the kernel's out-of-memory killer" if oom_kills and code == -signal.SIGKILL else ""
        return f"rank {ending.rank} was killed by {signal.Signals(-code).name}{killer} {ending.where}"
    return f"rank {ending.rank} exited with {code} {ending.where}"


def _plain(ending: Ending) -> dict[str, Any]:
    told = {k: v for k, v in (ending.failure or {}).items() if k != "traceback"}
    code = ending.exit_code
    how = {"signal": signal.Signals(-code).name} if code is not None and code < 0 else {"exit_code": code}
    return {"rank": ending.rank, **how, "phase": ending.phase, "step": ending.step, **told}
