"""State of a run's ranks, detection of pauses, the file `heartbeat.json`, and the outcome of the run.

The processes of a node are paused if the job is suspended, if they get SIGSTOP, or if the machine is in sleep mode. The
supervisor of the node sleeps for 0.2 s at a time. If far more time has passed after such a sleep, the supervisor was
paused. Time in which the supervisor computed or waited for a core is not a pause. The kernel reports this time, and it
is subtracted.
"""

import contextlib
import errno
import functools
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bench.core import store
from bench.core.errors import NoPrediction, UserError
from bench.core.formatting import describe_shortage
from bench.core.processes import identify_process, read_stat
from bench.core.record import MemoryShortage, Outcome, OutcomeKind
from bench.measure.failures import NotQuiet

GAP_S = 2.0
"""Minimum gap in seconds that counts as a pause of a supervisor. A supervisor polls every 0.2 s, so a shorter gap is an
ordinary delay."""
# Minimum seconds for which a stopped rank counts as paused. A debugger that reads stacks, for example, stops a rank
# briefly.
_RANK_S = 1.0
# States of a process that is stopped by a signal, or by a debugger.
_STOPPED = frozenset("Tt")
StopReason = Literal["cancelled", "timeout", "hang", "node_failure", "error"]


class Moment(NamedTuple):
    """Reading of two clocks. `at` is the time in seconds since the boot, including time in sleep mode.

    `active` is the number of seconds for which this thread has computed or waited for a core so far.
    """

    at: float
    active: float


class PauseTotals(NamedTuple):
    """Seconds of pauses on one node since the ranks started. `all_s` is the sum over all pauses. `in_steps_s` is the
    sum over the pauses during which a rank was making steps."""

    all_s: float = 0.0
    in_steps_s: float = 0.0

    def add(self, seconds: float, *, in_steps: bool) -> "PauseTotals":
        """Return the totals with another pause added."""
        return PauseTotals(self.all_s + seconds, self.in_steps_s + (seconds if in_steps else 0.0))

    def combine(self, *others: "PauseTotals") -> "PauseTotals":
        """Return the totals of several nodes together: for each total, the largest value of these nodes.

        A job is suspended on all of its nodes at the same time, so pauses of different nodes are not added.
        """
        return PauseTotals(*map(max, zip(self, *others, strict=True)))


class PauseWatch:
    """Detector of pauses of one supervisor and of its ranks. `sample` is called a few times per second."""

    def __init__(self, read_moment: Callable[[], Moment] | None = None) -> None:
        self._read_moment = read_moment or _read_moment
        self._last = self._read_moment()
        self._was_in_steps = False
        self._own = PauseTotals()
        self._ranks: dict[int, PauseTotals] = {}  # by process id
        # Process ids of ranks that are stopped now.
        self.stopped: frozenset[int] = frozenset()

    def restart(self) -> None:
        """Discard the time since the last call of `sample`. Call this method after the ranks have been started. Then
        the time for starting the ranks does not count as a pause of this supervisor."""
        self._last = self._read_moment()

    def sample(self, pids: Iterable[int], *, in_steps: bool) -> float:
        """Return the seconds for which this supervisor was paused since the last sample; 0 if it was not paused.

        `pids` are the process ids of this supervisor's running ranks. `in_steps` is true if any of these ranks is
        making steps.
        """
        last, self._last = self._last, self._read_moment()
        elapsed_s = self._last.at - last.at
        gap_s = elapsed_s - (self._last.active - last.active)
        paused_s = gap_s if gap_s > GAP_S else 0.0
        # A pause also counts as a pause in steps if ranks were making steps at the last sample. The step after the
        # pause may have ended the window before this sample.
        touched_steps, self._was_in_steps = in_steps or self._was_in_steps, in_steps
        self._own = self._own.add(paused_s, in_steps=touched_steps)
        self.stopped = frozenset(pid for pid in pids if _STOPPED.intersection(read_stat(pid)[:1]))
        for pid in () if paused_s else self.stopped:
            self._ranks[pid] = self._ranks.get(pid, PauseTotals()).add(elapsed_s, in_steps=touched_steps)
        return paused_s

    @property
    def totals(self) -> PauseTotals:
        """Seconds of pauses so far: the pauses of the supervisor, plus the pauses of the rank that was stopped
        longest."""
        longest = max(self._ranks.values(), default=PauseTotals())
        ranks = longest if longest.all_s >= _RANK_S else PauseTotals()
        return PauseTotals(self._own.all_s + ranks.all_s, self._own.in_steps_s + ranks.in_steps_s)


def _read_moment() -> Moment:
    active = 0.0  # stays 0 on a kernel without these counts
    with contextlib.suppress(OSError, ValueError):
        computed_ns, waited_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
        active = (int(computed_ns) + int(waited_ns)) / 1e9
    return Moment(time.clock_gettime(time.CLOCK_BOOTTIME), active)


class RankState(NamedTuple):
    """State of one rank, with its progress at its last heartbeat."""

    rank: int
    exit_code: int | None  # negative: number of the signal that killed it; None: still running
    stopped: bool  # True if its supervisor ended it; `exit_code` is then not used for the outcome
    failure: dict[str, Any] | None  # the rank's report of an exception
    phase: str
    step: int  # -1 outside the loop
    pid: int = 0
    silent_s: float = 0.0  # seconds since its last heartbeat
    stacks: str = ""  # stacks that it printed when its supervisor requested them
    host: str = ""
    survived: bool = False  # still running seconds after SIGKILL
    oom_kills: int = 0  # number of processes in its control group that the kernel's out-of-memory killer ended
    ended_steps: int = 0  # completed steps; until the first, the limit for the startup applies
    halted: bool = False  # currently stopped by a signal or a debugger

    @property
    def where(self) -> str:
        """Phase and step as text, e.g. "in steps at step 7"."""
        return f"in {self.phase}" + (f" at step {self.step}" if self.step >= 0 else "")


_NAMED = 8  # maximum number of ranks named in one line
_DISK_FULL = "the disk of the results is full; this attempt does not count"
# Beginnings of the messages of an OSError for a full disk and for a used-up quota.
_REFUSED = 1000
"""Maximum length of a UserError's message in an outcome, in characters."""
_NO_ROOM = tuple(f"[Errno {number}] " for number in (errno.ENOSPC, errno.EDQUOT))

# A lost rank makes other ranks fail too. The lost rank whose outcome comes first in this order is the cause. Outcomes
# that may be a consequence come last.
_ORDER: tuple[OutcomeKind, ...] = ("invalid", "oom", "host_oom", "error", "comm_error")


def classify_outcome(states: Sequence[RankState], stop: StopReason | None, why_stopped: str) -> Outcome:
    """Return the outcome of a run whose ranks wrote no record.

    If a rank was lost before the supervisor ended any rank, `stop` is None. The kind of the outcome then follows from
    one lost rank: the rank that most likely caused the loss of the other ranks. The field `evidence` of the outcome has
    the phase and step of each lost rank.

    Otherwise, `stop` is the reason for which the supervisor ended the ranks, and `why_stopped` is this reason as text.
    `stop` is then the kind of the outcome. The field `evidence` of the outcome has the phase and step of each lost
    rank. If no rank was lost, `evidence` has the phase and step of every rank.
    """
    lost = [state for state in states if not state.stopped and state.exit_code != 0]
    shown = lost or (states if stop else [])
    evidence: dict[str, Any] = {"ranks": [_build_rank_evidence(state) for state in shown]}
    if stacks := {str(state.rank): state.stacks for state in states if state.stacks}:
        evidence["stacks"] = stacks
    if left := list_survivors(states):
        evidence["survivors"] = [{"rank": state.rank, "pid": state.pid, "host": state.host} for state in left]
    if stop:
        return Outcome(kind=stop, reason=why_stopped, evidence=evidence)
    if not lost:
        return Outcome(kind="error", reason="every rank ended, and none wrote a record", evidence=evidence)
    full = [state for state in lost if _is_disk_full(state)]
    cause = min(full or lost, key=_rank_cause)
    failure = cause.failure or {}
    if failure:
        evidence["traceback"] = failure["traceback"]
    if oom_kills := {state.host: state.oom_kills for state in states if state.oom_kills}:
        evidence["oom_kills"] = oom_kills
    if full:
        evidence["disk_full"] = True
    if failure.get("exception") == NotQuiet.__name__:
        evidence["not_quiet"] = True
    if _is_refused(cause):
        evidence["refused"] = True
    shortage = None
    if plain := failure.get("shortage"):
        shortage = MemoryShortage.model_validate(plain | {"rank": cause.rank})
    reason = _format_reason(cause, shortage)
    reason = f"{_DISK_FULL}: {reason}" if full else reason
    return Outcome(kind=_classify_rank(cause), reason=reason, evidence=evidence, shortage=shortage)


def note_pause(outcome: Outcome, paused: PauseTotals) -> Outcome:
    """Return the outcome with the seconds of pauses added to its field `evidence`. If there was no pause, return the
    outcome unchanged.

    After a pause, the outcomes `node_failure` and `comm_error` are attributed to the pause and become `preempted`.
    """
    if not paused.all_s:
        return outcome
    evidence = outcome.evidence | {"paused_s": round(paused.all_s, 1)}
    if outcome.kind not in ("node_failure", "comm_error"):
        return outcome.model_copy(update={"evidence": evidence})
    reason = f"paused for {paused.all_s:.0f} s, and then {outcome.kind}: {outcome.reason}"
    return outcome.model_copy(update={"kind": "preempted", "reason": reason, "evidence": evidence})


def _is_disk_full(state: RankState) -> bool:
    """Return True if a rank failed because the disk or the user's quota is full. Such a failure says nothing about the
    configuration."""
    failure = state.failure or {}
    return failure.get("exception") == "OSError" and str(failure.get("message")).startswith(_NO_ROOM)


def _is_refused(state: RankState) -> bool:
    """Return True if a rank refused its input by a UserError, whose message explains the error."""
    return (state.failure or {}).get("exception") in (UserError.__name__, NoPrediction.__name__)


def list_survivors(states: Sequence[RankState]) -> list[RankState]:
    """Return the ranks that still run after SIGKILL. Their devices and memory are still in use."""
    return [state for state in states if state.survived]


def format_furthest_behind(states: Sequence[RankState]) -> str:
    """Return a text with the numbers of the ranks that probably cause a hang. A long list is cut and ends in "…".

    If any ranks are stopped by a signal, the text lists only these ranks. Otherwise it lists the ranks with the least
    progress, because the other silent ranks may be waiting for them.
    """

    def progress(state: RankState) -> tuple[int, bool]:
        # A rank that fetches the data of a step is behind a rank that computes the same step.
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


def _rank_cause(state: RankState) -> tuple[int, bool]:
    # Of two ranks with the same outcome, a killed rank comes before a rank with an exception, which may be a
    # consequence.
    return _ORDER.index(_classify_rank(state)), state.failure is not None


def _format_reason(state: RankState, shortage: MemoryShortage | None) -> str:
    if state.failure:
        message = str(state.failure["message"]).strip().splitlines() or [""]
        if _is_refused(state):  # a complete message with its remedy
            return f"rank {state.rank} {state.where}: {message[0][:_REFUSED]}"
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
    if state.stopped:
        how = {}  # the supervisor sent the signal
    return {"rank": state.rank, **how, "phase": state.phase, "step": state.step, **failure_fields}


def format_signal(name: str) -> str:
    """Return the name of a signal for a message about an interrupted run. "(Ctrl-C)" is appended to SIGINT."""
    return f"{name} (Ctrl-C)" if name == signal.SIGINT.name else name


class AsyncWriter:
    """Writer that executes one write at a time on a separate thread. Errors of a write are ignored.

    So a stalled file system does not delay the ranks, and is not mistaken for a hang or a lost node.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def start(self, write: Callable[[], object]) -> None:
        """Start the function `write`. Do nothing if the previous write is still running."""

        def run() -> None:
            with contextlib.suppress(OSError):
                write()

        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=run, daemon=True)
            self._thread.start()

    def wait(self, seconds: float) -> None:
        """Wait for the running write, but at most for `seconds`."""
        if self._thread:
            self._thread.join(seconds)


# A heartbeat is not needed after a crash of the machine, so it is not synced to the disk.
_replace_file = functools.partial(store.write_atomically, sync=False)


class HeartbeatWriter:
    """Writer of `heartbeat.json`, the file that shows the state of a running attempt. It is written every `every_s`
    seconds. While the file system is stalled, writes are skipped."""

    def __init__(self, folder: Path, every_s: float, replace: Callable[[Path, bytes], None] = _replace_file) -> None:
        """Create the writer that writes `heartbeat.json` into `folder` every `every_s` seconds. `replace(path,
        content)` replaces this file. The function `replace` runs on a separate thread, so it may block for any length
        of time."""
        self._path, self.every_s, self._replace = folder / store.HEARTBEAT, every_s, replace
        self._writer = AsyncWriter()
        self._at = -every_s

    @property
    def due(self) -> bool:
        return time.monotonic() - self._at >= self.every_s

    def show(self, state: str, ranks: Sequence[RankState]) -> None:
        """Start to write the state of the run and of its ranks."""
        self._at = time.monotonic()
        content = build_heartbeat(state, ranks)
        self._writer.start(lambda: self._replace(self._path, content))

    def end(self, ranks: Sequence[RankState], patience_s: float) -> None:
        """Write the last heartbeat, waiting at most `patience_s` seconds for the file system."""
        self._writer.wait(patience_s / 2)
        self.show("ended", ranks)
        self._writer.wait(patience_s / 2)


def build_heartbeat(state: str, ranks: Sequence[RankState] = ()) -> bytes:
    """Return the content of `heartbeat.json` for an attempt (try at a run) of this process. `state` is, for example,
    "running"; before the ranks start it is "claimed", and `ranks` is empty."""
    process = identify_process(os.getpid())
    plain = {
        "state": state,
        "at": format_now(),
        "host": socket.gethostname(),
        "supervisor": os.getpid(),
        "process": process._asdict() if process else None,
        "ranks": [
            {
                "rank": rank.rank,
                "pid": rank.pid,
                "phase": rank.phase,
                "step": rank.step,
                "silent_s": round(rank.silent_s, 1),
            }
            for rank in ranks
        ],
    }
    return json.dumps(plain, indent=1).encode()


def format_now() -> str:
    """Return the current UTC time in ISO 8601 format with a resolution of seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")
