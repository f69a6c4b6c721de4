"""Tests of the budget of a study, an amount of money. The budget is checked before a job is submitted, and while jobs
run."""

import logging
from pathlib import Path
from typing import Any

import pytest
from test_vertex_jobs import hand_in, options
from vertex_server import VertexServer, types

from bench.core.errors import UserError
from bench.launchers.vertex import Options, sync
from bench.launchers.vertex import service as vertex_service
from bench.launchers.vertex.states import Cost, compute_cost

__all__ = ["options"]

JOB_HOURS = 2 * 32 / 60
"""Node-hours of a job of `hand_in` until its time limit: two nodes for 32 minutes, which are the limit of 30 minutes
and 2 minutes for the start."""
NAMES = [f"study-112603040{number}-abcdef" for number in range(4)]


def with_budget(chosen: Options, budget: float, price: float = 10.0) -> Options:
    return chosen.model_copy(update={"budget": budget, "price_per_node_hour": price})


def custom_job(state: str, began: float | None, ended: float | None, timeout_s: int, label: str = "") -> Any:
    job = types.CustomJob(
        state=types.JobState[f"JOB_STATE_{state}"],
        job_spec={
            "worker_pool_specs": [{"replica_count": 1}, {"replica_count": 3}],
            "scheduling": {"timeout": {"seconds": timeout_s}},
        },
        labels={"zeroscale-thousandths-per-hour": label} if label else {},
    )
    for field, value in (("start_time", began), ("end_time", ended)):
        if value is not None:
            setattr(job, field, {"seconds": int(value)})
    return job


@pytest.mark.parametrize(
    ("job", "expected"),
    [
        (custom_job("SUCCEEDED", 1000, 4600, 7200), Cost(8.0, 0.0)),
        (custom_job("RUNNING", 4600, None, 7200), Cost(8.0, 8.0)),
        (custom_job("RUNNING", 4600, None, 1800), Cost(8.0, 0.0)),
        (custom_job("QUEUED", None, None, 7200), Cost(0.0, 16.0)),
        (custom_job("CANCELLED", None, 4600, 7200), Cost(0.0, 0.0)),
        (custom_job("FAILED", 1000, 4600, 7200, label="1500"), Cost(1.5, 0.0)),
    ],
    ids=["ended", "running", "late", "queued", "never started", "at an earlier price"],
)
def test_cost_of_a_job_of_four_nodes_at_two_per_hour(job: Any, expected: Cost) -> None:
    assert compute_cost([job], 2.0, now=8200.0) == pytest.approx(expected)


def test_jobs_are_submitted_while_their_time_limits_fit_into_the_budget(
    service: VertexServer, options: Options, tmp_path: Path
) -> None:
    chosen = with_budget(options, 2.5 * JOB_HOURS * 10)
    handles = [hand_in(tmp_path, chosen, name) for name in NAMES[:2]]
    with pytest.raises(UserError) as refused:
        hand_in(tmp_path, chosen, NAMES[2])
    assert str(refused.value).startswith(
        "launcher.budget=26.6667: 0.00 is spent, other jobs may cost 21.33 more, and this job may cost 10.67 until its"
        " time limit; wait for the end of other jobs, "
    )
    assert [job.name for job in service.find()] == handles
    # The cost of time that a job did not use is available to other jobs again.
    service.set_state(handles[0], "RUNNING")
    service.set_state(handles[0], "SUCCEEDED", after_s=60.0)
    hand_in(tmp_path, chosen, NAMES[2])
    assert len(service.find()) == 3


def test_jobs_of_another_study_do_not_count(service: VertexServer, options: Options, tmp_path: Path) -> None:
    chosen = with_budget(options, 1.5 * JOB_HOURS * 10)
    hand_in(tmp_path, chosen, NAMES[0])
    hand_in(tmp_path, chosen.model_copy(update={"staging_bucket": f"file://{tmp_path}/other"}), NAMES[1])
    assert len(service.find()) == 2


def test_of_two_submitters_at_once_the_later_one_takes_its_job_back(
    service: VertexServer, options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes submit jobs of one study. After the first process has checked the budget, and before it creates its
    job, the second process creates a job. Both jobs together exceed the budget."""
    chosen, create = with_budget(options, 1.5 * JOB_HOURS * 10), vertex_service.Service.create
    monkeypatch.setattr(vertex_service.Service, "create", lambda self, job: other() and create(self, job))

    def other() -> str:
        monkeypatch.setattr(vertex_service.Service, "create", create)
        return hand_in(tmp_path, chosen, NAMES[1])

    with pytest.raises(UserError, match=r"other jobs may cost 10.67 more, and this job may cost 10.67"):
        hand_in(tmp_path, chosen, NAMES[0])
    assert [(job.display_name, job.state.name) for job in service.find()] == [
        (NAMES[1], "JOB_STATE_QUEUED"), (NAMES[0], "JOB_STATE_CANCELLED"),
    ]  # fmt: skip


def test_running_jobs_are_cancelled_when_the_budget_is_spent(
    service: VertexServer, options: Options, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    handles = [hand_in(tmp_path, options, name) for name in NAMES[:2]]
    service.set_state(handles[0], "RUNNING")
    service.set_state(handles[0], "SUCCEEDED", after_s=1800.0)  # one node-hour
    study = tmp_path / "results" / "study"
    with caplog.at_level(logging.WARNING):
        sync(study, with_budget(options, 10.1))
        assert [job.name for job in service.find("QUEUED")] == handles[1:] and not caplog.messages
        sync(study, with_budget(options, 9.9))
    assert caplog.messages == ["10.00 of the budget of 9.9 is spent; cancelling 1 job"]
    assert service.find("QUEUED") == [] and len(service.find("CANCELLED")) == 1
