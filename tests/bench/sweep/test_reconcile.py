"""Outcomes of runs that left no record, derived from the scheduler's state of their job."""

import pytest

from bench.core.scheduling import JobState
from bench.launchers.slurm import states
from bench.sweep.lost import LeftBehind, reconcile_outcome

SILENT = LeftBehind(None, None)
INTERRUPTED = LeftBehind({"signal": "SIGTERM", "at": "2026-11-21T12:00:00+00:00"}, {"state": "running"})


def ended(word: str) -> JobState:
    """Return the state, parsed from `sacct`, of a job that ended with a state such as TIMEOUT."""
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
def test_the_schedulers_word_decides_and_is_kept_as_evidence(state: str, kind: str) -> None:
    found = reconcile_outcome(SILENT, ended(state), restarted=False)
    assert found.kind == kind
    assert found.evidence["scheduler"] == {"state": state, "words": ended(state).words, "source": "sacct"}


def test_a_signal_alone_says_that_it_was_interrupted_and_not_by_whom() -> None:
    found = reconcile_outcome(INTERRUPTED, None, restarted=False)
    assert found.kind == "cancelled" and "SIGTERM" in found.reason
    assert found.evidence == {"interrupted": INTERRUPTED.interrupted, "last_heartbeat": INTERRUPTED.heartbeat}


def test_a_job_that_failed_was_not_cancelled_though_what_was_left_of_it_was_asked_to_end() -> None:
    """If one supervisor dies, `srun --kill-on-bad-exit` sends a signal to the other processes of the job."""
    found = reconcile_outcome(INTERRUPTED, ended("FAILED"), restarted=False)
    assert found.kind == "error" and "FAILED" in found.reason and "SIGTERM" in found.reason
    assert found.evidence["interrupted"] == INTERRUPTED.interrupted
    assert found.evidence["scheduler"]["words"].startswith("12|FAILED|")


def test_a_run_asked_to_end_when_its_jobs_time_was_almost_over_ran_out_of_time() -> None:
    def asked_to_end(left_s: float) -> LeftBehind:
        return LeftBehind({"signal": "SIGTERM", "left_s": left_s, "warning_s": 60}, None)

    failed = ended("FAILED")
    assert reconcile_outcome(asked_to_end(70), failed, restarted=False).kind == "timeout"
    assert reconcile_outcome(asked_to_end(600), failed, restarted=False).kind == "error"
    cancelled = reconcile_outcome(asked_to_end(70), ended("CANCELLED"), restarted=False)
    assert cancelled.kind == "cancelled", "where the scheduler says why"


def test_a_job_back_in_the_queue_was_preempted_if_it_was_asked_to_end_else_its_node_died() -> None:
    assert reconcile_outcome(INTERRUPTED, None, restarted=True).kind == "preempted"
    assert reconcile_outcome(SILENT, None, restarted=True).kind == "node_failure"


def test_a_job_that_nobody_knows_any_more_is_an_error_and_is_tried_again() -> None:
    found = reconcile_outcome(SILENT, None, restarted=False)
    assert found.kind == "error" and not found.final and "no longer knows" in found.reason


def test_an_exit_code_is_told_in_words() -> None:
    [killed] = states.parse_sacct("12|FAILED|1|2026-11-21T12:00:00|2026-11-21T12:01:00|137:0|None|s")
    found = reconcile_outcome(SILENT, killed, restarted=False)
    assert found.evidence["scheduler"]["exit"] == "exit code 137, as of SIGKILL"
    assert found.reason.startswith("the job ended as FAILED (exit code 137, as of SIGKILL) and left no record")
