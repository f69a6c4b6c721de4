"""Tests of the outcome of a run that left no record. The outcome is derived from the state of its job in the
scheduler."""

import pytest

from bench.core.scheduling import JobState
from bench.launchers.slurm import states
from bench.sweep.lost import LeftBehind, reconcile_outcome

SILENT: LeftBehind = {}
INTERRUPTED = {
    "interrupted": {"signal": "SIGTERM", "at": "2026-11-21T12:00:00+00:00"},
    "last_heartbeat": {"state": "running"},
}


def ended(word: str) -> JobState:
    """Return the state of a job that ended with the word `word` (such as TIMEOUT) in the output of `sacct`."""
    [state] = states.parse_sacct(f"12|{word}|1|2026-11-21T12:00:00|2026-11-21T12:01:00|0:0|None|s")
    return state


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("CANCELLED", "cancelled"),
        ("TIMEOUT", "timeout"),
        ("DEADLINE", "timeout"),
        ("PREEMPTED", "preempted"),
        ("NODE_FAIL", "node_failure"),
        ("OUT_OF_MEMORY", "host_oom"),
        ("FAILED", "error"),
        ("COMPLETED", "error"),
    ],
)
def test_schedulers_state_determines_the_outcome_and_is_kept_as_evidence(state: str, kind: str) -> None:
    found = reconcile_outcome(SILENT, ended(state), restarted=False)
    assert found.kind == kind
    assert found.evidence["scheduler"] == {"state": state, "words": ended(state).words, "source": "sacct"}


def test_signal_without_a_scheduler_state_gives_a_cancelled_run() -> None:
    found = reconcile_outcome(INTERRUPTED, None, restarted=False)
    assert found.kind == "cancelled" and "SIGTERM" in found.reason
    assert found.evidence == INTERRUPTED


def test_signal_in_a_failed_job_gives_an_error_instead_of_a_cancelled_run() -> None:
    """If one supervisor of a job fails, `srun --kill-on-bad-exit` sends a signal to the job's other processes. So in a
    failed job, a signal does not mean that a user cancelled the run."""
    found = reconcile_outcome(INTERRUPTED, ended("FAILED"), restarted=False)
    assert found.kind == "error" and "FAILED" in found.reason and "SIGTERM" in found.reason
    assert found.evidence["interrupted"] == INTERRUPTED["interrupted"]
    assert found.evidence["scheduler"]["words"].startswith("12|FAILED|")


def test_signal_near_the_jobs_time_limit_gives_a_timeout() -> None:
    def signalled(left_s: float) -> LeftBehind:
        return {"interrupted": {"signal": "SIGTERM", "left_s": left_s, "warning_s": 60}}

    failed = ended("FAILED")
    assert reconcile_outcome(signalled(70), failed, restarted=False).kind == "timeout"
    assert reconcile_outcome(signalled(600), failed, restarted=False).kind == "error"
    cancelled = reconcile_outcome(signalled(70), ended("CANCELLED"), restarted=False)
    assert cancelled.kind == "cancelled", "the scheduler's state takes precedence"


def test_requeued_job_was_preempted_after_a_signal_and_lost_its_node_without_one() -> None:
    assert reconcile_outcome(INTERRUPTED, None, restarted=True).kind == "preempted"
    assert reconcile_outcome(SILENT, None, restarted=True).kind == "node_failure"


def test_job_forgotten_by_the_scheduler_is_an_error_that_can_be_retried() -> None:
    found = reconcile_outcome(SILENT, None, restarted=False)
    assert found.kind == "error" and not found.final and "no longer knows" in found.reason


def test_exit_code_is_described_in_the_reason() -> None:
    [killed] = states.parse_sacct("12|FAILED|1|2026-11-21T12:00:00|2026-11-21T12:01:00|137:0|None|s")
    found = reconcile_outcome(SILENT, killed, restarted=False)
    assert found.evidence["scheduler"]["exit"] == "exit code 137, as of SIGKILL"
    assert found.reason.startswith("the job ended as FAILED (exit code 137, as of SIGKILL) and left no record")
