"""Rules that must be true after any fault. The outcome of an affected attempt (one try at a run) matches the fault.
Each point has at most one final result. No job, process or temporary file is left over."""

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from bench.core import store
from bench.core.record import Circumstance, OutcomeKind, RunRecord
from bench.sweep.definition import RunKey
from chaos.faults import Strike
from chaos.marked import list_processes
from chaos.sweep import Sweep

_FULL = r"No space|Errno 28|OSError 28|disk"
_LOST = r"(closed its connection|has sent no report|requeued)"
_CUT = r"(has sent no report|has been silent for|left: it has received nothing from)"
EXPECTED: Mapping[str, Mapping[OutcomeKind, str]] = {
    "kill rank": {"error": r"was killed by SIGKILL"},
    "kill member agent": {"error": r"ended as FAILED", "node_failure": _LOST},
    "kill coordinator": {"error": r"ended as|supervisor died|FAILED"},
    "kill fork server": {"ok": ""},  # running ranks continue, and the next point gets a new server
    "kill srun": {"error": r"ended as FAILED"},
    "stop rank briefly": {"ok": ""},
    "stop rank for long": {"hang": ""},
    "slurmd down briefly": {"ok": ""},
    "slurmd down for long": {"node_failure": "", "preempted": r"requeued"},
    "crash node": {"node_failure": "", "preempted": r"requeued"},
    "controller stopped": {"ok": ""},
    "controller killed": {"ok": ""},
    "cut link briefly": {"ok": ""},
    "cut link for long": {"node_failure": _CUT},
    "stall file system": {"ok": ""},
    "suspend": {"ok": ""},  # with paused_s in the record
    "requeue": {"preempted": r"requeued"},
    "scancel": {"cancelled": ""},
    "scancel with SIGKILL": {"cancelled": "", "error": r"ended as FAILED"},
    "fill disk": {"ok": "", "error": _FULL},
    "two resumes at once": {"ok": ""},
    "kill the sweep command": {"ok": "", "error": "supervisor", "cancelled": ""},
    "interrupt the sweep command": {"cancelled": ""},
}
"""For each kind of fault: the expected outcomes of a run that was making steps when the fault happened. Each outcome
has a regular expression that the recorded reason must match."""
_RACES: Mapping[OutcomeKind, str] = {"ok": "", "cancelled": r"a moment earlier"}
"""Outcomes that are accepted after every fault. A run that was already complete when the fault happened is `ok`. If two
processes work on the same run, the second ends immediately as `cancelled`."""


_FAILURES: tuple[OutcomeKind, ...] = ("error", "hang", "comm_error")
_ATTEMPTS = 3  # maximum number of failures that count against a point


_END_S = 20.0
_PAUSES = ("stop rank briefly", "suspend")


def judge(kind: str, outcome: OutcomeKind, reason: str) -> bool:
    """Return True if the recorded outcome and reason of an attempt match the kind of fault that affected the
    attempt."""
    fits: dict[OutcomeKind, str] = {**_RACES, **EXPECTED[kind]}
    return outcome in fits and bool(re.search(fits[outcome], reason))


def has_struck(kind: str, made: Strike) -> bool:
    """Return True if a fault came in time. Some kinds of faults stop an attempt. Such a fault came too late if every
    attempt that it could affect has the outcome `ok`."""
    paths = [attempt.folder / store.RECORD for attempt in made.hit]
    harmless = "ok" in EXPECTED[kind]
    unharmed = paths and all(path.exists() and store.read_record(path).outcome.kind == "ok" for path in paths)
    return made.in_time and (harmless or not unharmed)


def list_untrue(kind: str, made: Strike) -> Iterator[str]:
    """Yield a description of each attempt that contradicts an injected fault, although the fault could affect the
    attempt. Either the attempt has no record, the outcome in its record does not match the fault, or a pause of its
    ranks is not recorded."""
    for attempt in made.hit:
        path = attempt.folder / store.RECORD
        if not path.exists():
            yield f"{attempt.folder.name} of {attempt.folder.parent.name} has no record"
            continue
        outcome = store.read_record(path).outcome
        if not judge(kind, outcome.kind, outcome.reason):
            yield f"{kind}: recorded {outcome.kind}: {outcome.reason}"
        if kind in _PAUSES and made.in_time and outcome.kind == "ok" and not _find_pause_s(path):
            yield f"{kind}: recorded ok, and no pause"


def _find_pause_s(path: Path) -> float:
    """Return the seconds for which a run was paused; zero if none are recorded within a time limit.

    The function waits, because the supervisor adds this value to the record only after all ranks have ended.
    """
    until = time.monotonic() + _END_S
    while not (paused_s := store.read_record(path).outcome.paused_s) and time.monotonic() < until:
        time.sleep(0.5)
    return paused_s


def list_broken(sweep: Sweep) -> Iterator[str]:
    """Yield a description of each rule that is broken at the end of a round (one sweep with its faults)."""
    status = sweep.read_status()
    states = {
        RunKey(point["config_id"], point["machine"], point["repeat"]): point["state"] for point in status["points"]
    }
    if len(states) != sweep.asked:
        yield f"{len(states)} points are known of {sweep.asked}"
    finals, answers, failures = Counter[RunKey](), Counter[RunKey](), Counter[RunKey]()
    for folder in sorted(sweep.attempts()):
        name = f"{folder.parent.name}/{folder.name}"
        if not (folder / store.CIRCUMSTANCE).exists():
            yield f"{name} was claimed, but has no circumstance file"
            continue
        circumstance = Circumstance.model_validate_json((folder / store.CIRCUMSTANCE).read_bytes())
        key = RunKey(folder.parent.name, circumstance.machine.name, circumstance.repeat)
        if key not in states:
            yield f"{name} belongs to no requested point"
        if not (folder / store.RECORD).exists():
            yield f"{name} has no record"
            continue
        record = store.read_record(folder / store.RECORD)
        paused = bool(record.outcome.paused_s)  # a paused run counts neither as a result nor as a failure of the point
        finals[key] += record.outcome.final and not paused
        answers[key] += record.outcome.kind == "ok" and not paused
        failures[key] += (
            record.outcome.kind in _FAILURES and not record.outcome.evidence.get("disk_full") and not paused
        )
        yield from _list_foreign_hosts(sweep, name, record)
    for key, state in states.items():
        used_up = failures[key] == _ATTEMPTS
        if failures[key] > _ATTEMPTS or state != ("given up" if used_up and not finals[key] else "answered"):
            yield f"{key.config_id} repeat {key.repeat} is {state} after {failures[key]} failures of its own"
    wrong = {key: finals[key] for key, at in states.items() if finals[key] != (at == "answered")}
    yield from (f"{key.config_id} repeat {key.repeat} has {n} final answers" for key, n in wrong.items())
    yield from (f"{key.config_id} repeat {key.repeat} has {n} ok" for key, n in answers.items() if n > 1)
    yield from sweep.list_tracebacks()
    yield from _list_left(sweep)


def _list_foreign_hosts(sweep: Sweep, name: str, record: RunRecord) -> Iterator[str]:
    """Yield an error if the hosts in the record of an attempt differ from the hosts of its allocation, as listed by
    Slurm. `name` is the name of the attempt in the error."""
    environment = record.environment
    if environment and (nodes := environment.slurm.get("SLURM_JOB_NODELIST")):
        allocated = sweep.bed.slurm("scontrol", "show", "hostnames", nodes).split()
        if list(environment.hosts) != allocated:
            yield f"{name} ran on {environment.hosts}, and its allocation is {allocated}"


def _list_left(sweep: Sweep) -> Iterator[str]:
    """Yield a description of each job, process and temporary file that is left over."""
    queued = sweep.bed.slurm("squeue", "--noheader", "--format=%i %j %T").splitlines()
    yield from (f"job {line} is left" for line in queued)
    yield from (f"process {left.pid} is left: {left.words[:80]}" for left in list_processes(sweep.mark))
    yield from (f"file {path.relative_to(sweep.folder)} is left" for path in sorted(sweep.folder.rglob(".*")))
