"""From typed evidence to an outcome: pure, so that every case is a line in a test."""

import errno
import signal
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from bench.formatting import describe_shortage
from bench.record import MemoryShortage, Outcome, OutcomeKind
from bench.runtime.pauses import PauseTotals

StopReason = Literal["cancelled", "timeout", "hang", "node_failure", "error"]


class RankState(NamedTuple):
    """How one rank is or ended, and where it was when it last said so."""

    rank: int
    exit_code: int | None  # negative: killed by that signal; None: still running
    stopped: bool  # by its supervisor, so its end is no evidence
    failure: dict[str, Any] | None  # what it said of its exception
    phase: str
    step: int  # -1 outside the loop
    pid: int = 0
    silent_s: float = 0.0  # since its last beat
    stacks: str = ""  # what it printed when it was asked where it stands
    host: str = ""
    survived: bool = False  # SIGKILL, and for seconds
    oom_kills: int = 0  # of its supervisor's control group, by the kernel's out-of-memory killer, meanwhile
    ended_steps: int = 0  # of the loop; the first step compiles, allocates and sets up communication
    halted: bool = False  # stopped by a signal or a debugger now

    @property
    def where(self) -> str:
        return f"in {self.phase}" + (f" at step {self.step}" if self.step >= 0 else "")


_NAMED = 8  # ranks in one line
_DISK_FULL = "the disk of the results is full, which costs the point no attempt"
_NO_ROOM = tuple(f"[Errno {number}] " for number in (errno.ENOSPC, errno.EDQUOT))  # as an OSError begins

# A lost peer makes the others fail too: what can be a consequence stands behind what cannot.
_ORDER: tuple[OutcomeKind, ...] = ("invalid", "oom", "host_oom", "error", "comm_error")


def classify_outcome(states: Sequence[RankState], stop: StopReason | None, why_stopped: str) -> Outcome:
    """Decide the outcome of a run that left no record.

    `stop` is why the supervisor ended the ranks, if it did so before any rank was lost.
    """
    lost = [state for state in states if not state.stopped and state.exit_code != 0]
    evidence: dict[str, Any] = {"ranks": [_build_rank_evidence(state) for state in lost]}
    if stacks := {str(state.rank): state.stacks for state in states if state.stacks}:
        evidence["stacks"] = stacks
    if left := list_survivors(states):
        evidence["survivors"] = [{"rank": state.rank, "pid": state.pid, "host": state.host} for state in left]
    if stop:
        return Outcome(kind=stop, reason=why_stopped, evidence=evidence)
    if not lost:
        return Outcome(kind="error", reason="every rank ended, and none wrote a record", evidence=evidence)
    full = [state for state in lost if _is_disk_full(state)]
    cause = min(full or lost, key=_compute_cause_order)
    if cause.failure:
        evidence["traceback"] = cause.failure["traceback"]
    if oom_kills := {state.host: state.oom_kills for state in states if state.oom_kills}:
        evidence["oom_kills"] = oom_kills
    if full:
        evidence["disk_full"] = True
    reason = f"{_DISK_FULL}: {_format_reason(cause)}" if full else _format_reason(cause)
    return Outcome(kind=_classify_rank(cause), reason=reason, evidence=evidence, shortage=_find_shortage(cause))


def note_pause(outcome: Outcome, paused: PauseTotals) -> Outcome:
    """Return the outcome of a run that was paused, with the seconds in its evidence. Nodes and peers that were lost to
    the pause are not lost to a fault: the attempt was preempted."""
    if not paused.all_s:
        return outcome
    evidence = outcome.evidence | {"paused_s": round(paused.all_s, 1)}
    if outcome.kind not in ("node_failure", "comm_error"):
        return outcome.model_copy(update={"evidence": evidence})
    reason = f"paused for {paused.all_s:.0f} s, and then {outcome.kind}: {outcome.reason}"
    return outcome.model_copy(update={"kind": "preempted", "reason": reason, "evidence": evidence})


def _is_disk_full(state: RankState) -> bool:
    """Whether a rank failed for want of room on the disk, or in the user's quota, which is the site's fault."""
    failure = state.failure or {}
    return failure.get("exception") == "OSError" and str(failure.get("message")).startswith(_NO_ROOM)


def list_survivors(states: Sequence[RankState]) -> list[RankState]:
    """Return the ranks that SIGKILL did not end. Their devices and memory are not free."""
    return [state for state in states if state.survived]


def format_furthest_behind(states: Sequence[RankState]) -> str:
    """Name the ranks that the others wait for in a hang; the silent ones may all be victims. Within a step, fetching
    its data comes before computing."""

    def progress(state: RankState) -> tuple[int, bool]:
        return state.step, state.phase != "fetch"

    if halted := [state for state in states if state.halted]:
        return "stopped by a signal: " + ", ".join(f"rank {state.rank} {state.where}" for state in halted[:_NAMED])
    last = min(map(progress, states))
    behind = [state for state in states if progress(state) == last]
    named = ", ".join(str(state.rank) for state in behind[:_NAMED]) + (", …" if len(behind) > _NAMED else "")
    return f"furthest behind: rank{'s' if len(behind) > 1 else ''} {named} {behind[0].where}"


def _classify_rank(state: RankState) -> OutcomeKind:
    if state.failure:
        kind: OutcomeKind = state.failure["outcome"]
        return kind
    killed = state.exit_code == -signal.SIGKILL
    return "host_oom" if killed and state.oom_kills else "error"


def _compute_cause_order(state: RankState) -> tuple[int, bool]:
    # Killed from outside comes before an exception of the same kind, which may be the echo of a lost peer.
    return _ORDER.index(_classify_rank(state)), state.failure is not None


def _find_shortage(state: RankState) -> MemoryShortage | None:
    """Return what a rank told of the memory that it ran out of."""
    text = (state.failure or {}).get("shortage")
    return MemoryShortage.model_validate(text | {"rank": state.rank}) if text else None


def _format_reason(state: RankState) -> str:
    if state.failure:
        shortage = _find_shortage(state)
        message = str(state.failure["message"]).strip().splitlines() or [""]
        text = describe_shortage(shortage) if shortage else message[0][:300]
        return f"rank {state.rank} {state.where}: {state.failure['exception']}: {text}"
    code = state.exit_code
    if code is not None and code < 0:
        killer = " by the kernel's out-of-memory killer" if state.oom_kills and code == -signal.SIGKILL else ""
        return f"rank {state.rank} was killed by {signal.Signals(-code).name}{killer} {state.where}"
    return f"rank {state.rank} exited with {code} {state.where}"


def _build_rank_evidence(state: RankState) -> dict[str, Any]:
    failure_fields = {k: v for k, v in (state.failure or {}).items() if k not in ("traceback", "shortage")}
    code = state.exit_code
    how = {"signal": signal.Signals(-code).name} if code is not None and code < 0 else {"exit_code": code}
    return {"rank": state.rank, **how, "phase": state.phase, "step": state.step, **failure_fields}
