"""States and costs of Vertex AI's custom jobs, as read from the service's answers. There are no side effects."""

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from bench.core.record import OutcomeKind
from bench.core.scheduling import JobState, Phase
from bench.launchers.vertex.planning import PRICE_LABEL

_PHASES: dict[str, Phase] = {
    "QUEUED": "pending", "PENDING": "pending", "SUCCEEDED": "ended", "FAILED": "ended", "CANCELLED": "ended",
    "PAUSED": "ended", "EXPIRED": "ended", "PARTIALLY_SUCCEEDED": "ended",
}  # fmt: skip
"""Phase of each state of google.cloud.aiplatform_v1.JobState, without its prefix. Every other state counts as running,
so an unknown state of a newer service does not look like the end of a job."""
_CAUSES: tuple[tuple[str, OutcomeKind, str], ...] = (
    (r"out[- ]of[- ]memory|non-zero status of (?:9\b|137)", "host_oom", "a machine of the job ran out of memory"),
    # The service reports a withdrawn Spot VM as a stockout: https://cloud.google.com/vertex-ai/docs/training/use-spot-vms
    (r"preempt|stockout|insufficient|not have enough resources", "preempted",
     "a machine was withdrawn, or none was available"),
    (r"time[sd]?[- ]?out|deadline|maximum (?:run|duration|running)", "timeout", "the job reached its time limit"),
    (r"exited with a non-zero status", "error", ""),
    (r"internal error|maintenance|hardware|unhealthy|lost|machine .*(?:fail|terminat)", "node_failure",
     "a machine of the job failed"),
)  # fmt: skip
"""Causes of failed jobs. Each entry has a pattern of the job's error message, the outcome of the job's run if the run
left no record, and the description of the cause. The first pattern that matches counts."""
_DEFAULT_TIMEOUT_S = 7 * 24 * 3600.0
"""The service's time limit for a job whose request has no timeout."""
_STATUS = re.compile(r"non-zero status of (\d+)")


class JobUse(NamedTuple):
    """Times of a job. They determine the job's cost until now and its largest possible cost."""

    began_at: float | None  # seconds since the epoch; None if the job did not begin
    ended_at: float | None  # None if the job has not ended
    timeout_s: float | None  # longest time that the job may run; None if the request has no timeout
    is_live: bool  # True if the job has not ended


def find_phase(state: str) -> Phase:
    """Return the phase of a job with this state, such as `RUNNING`."""
    return _PHASES.get(state, "running")


def build_state(job: Any) -> JobState:
    """Return the state of a `CustomJob`."""
    state = job.state.name.removeprefix("JOB_STATE_")
    phase, use = find_phase(state), read_use(job)
    message = " ".join(job.error.message.split())
    outcome, why = _find_outcome(state, message, use) if phase == "ended" else (None, "")
    status = _STATUS.search(message) if phase == "ended" else None
    code = 0 if state == "SUCCEEDED" else int(status[1]) if status else None
    return JobState(
        handle=job.name,
        name=job.display_name,
        task=None,
        phase=phase,
        state=state,
        reason="" if phase == "ended" else message,
        outcome=outcome,
        why=why,
        restarts=0,  # retries are disabled in the request
        nodes=count_nodes(job),
        started_at=use.began_at,
        ended_at=use.ended_at,
        source="Vertex AI",
        words=f"{job.name} {state}" + (f": {message}" if message else ""),
        exit_code=code,
        exit=f"exit code {code}" if code else message if state == "FAILED" else "",
    )


def _find_outcome(state: str, message: str, use: JobUse) -> tuple[OutcomeKind | None, str]:
    """Return the outcome of a run that left no record, and a description of the outcome. `state` and `message` are the
    state and the error message of its ended job."""
    if state == "EXPIRED":
        return "timeout", "the job reached its time limit"
    if state == "CANCELLED":
        # The service cancels a job that reaches its timeout. Only the duration then shows that the timeout was the
        # cause.
        lasted_s = use.ended_at - use.began_at if use.began_at and use.ended_at else 0.0
        if use.timeout_s and lasted_s >= use.timeout_s - 1:
            return "timeout", "the job reached its time limit"
        return "cancelled", "the job was cancelled"
    if state == "PAUSED":
        return "cancelled", "the job was paused"
    if state != "FAILED":
        return None, ""
    for pattern, outcome, why in _CAUSES:
        if re.search(pattern, message, re.IGNORECASE):
            return outcome, why
    return "error", ""


def read_use(job: Any) -> JobUse:
    """Return the times of a `CustomJob` that determine its cost."""
    state = job.state.name.removeprefix("JOB_STATE_")
    timeout_s = job.job_spec.scheduling.timeout.total_seconds() if job.job_spec.scheduling.timeout else None
    return JobUse(_read_time(job, "start_time"), _read_time(job, "end_time"), timeout_s, find_phase(state) != "ended")


def _read_time(job: Any, field: str) -> float | None:
    """Return a time of a job in seconds since the epoch; None if it is not set."""
    return float(getattr(job, field).timestamp()) if field in job else None


def count_nodes(job: Any) -> int:
    """Return the number of machines of a `CustomJob`."""
    return sum(int(pool.replica_count) for pool in job.job_spec.worker_pool_specs)


class Cost(NamedTuple):
    """Cost of jobs in the currency of the price. The cost excludes the price of disks, and the start-up time of
    machines."""

    spent: float  # cost of ended jobs, and of running jobs until now
    reserved: float  # largest further cost of the jobs that have not ended

    @property
    def total(self) -> float:
        return self.spent + self.reserved


def compute_cost(jobs: Iterable[Any], price_per_node_hour: float, now: float) -> Cost:
    """Return the cost of `CustomJob`s. `now` is in seconds since the epoch.

    The price of a job is the price at its submission, which is stored in a label of the job. The price of a job without
    this label is `price_per_node_hour`.
    """
    spent = reserved = 0.0
    for job in jobs:
        label, use = job.labels.get(PRICE_LABEL, ""), read_use(job)
        per_s = (int(label) / 1000 if label.isdigit() else price_per_node_hour * count_nodes(job)) / 3600
        until = now if use.is_live else use.ended_at
        used_s = max(0.0, until - use.began_at) if until and use.began_at else 0.0
        spent += per_s * used_s
        if use.is_live:
            reserved += per_s * max(0.0, (use.timeout_s or _DEFAULT_TIMEOUT_S) - used_s)
    return Cost(spent, reserved)
