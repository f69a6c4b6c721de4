"""Tests of the submission, the states and the cancellation of Vertex AI custom jobs. They call a stand-in for the
service on this machine over gRPC."""

import logging
from pathlib import Path

import pytest
from vertex_server import LOST, QUOTA, STOCKOUT, Fault, VertexServer, grpc

from bench.core.errors import UserError
from bench.core.object_store import ObjectStore
from bench.core.scheduling import JobState, SchedulerUnavailable, Work
from bench.launchers.vertex import Options, ask, cancel_all, plan, submit
from bench.launchers.vertex import queue as vertex_queue
from bench.launchers.vertex import service as vertex_service

AWAY = Fault()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses between repeated calls of the service, and the timeout of a call."""
    monkeypatch.setattr(vertex_queue, "_PAUSES_S", (0.05, 0.1, 0.2))
    monkeypatch.setattr(vertex_service, "_ANSWER_S", 2.0)


@pytest.fixture
def options(service: VertexServer, tmp_path: Path) -> Options:
    return Options(
        project="my-project", region="us-central1", staging_bucket=f"file://{tmp_path}/bucket",
        image="registry.example.com/p/r/zeroscale:1", machine_type="n1-standard-4", endpoint=service.endpoint,
    )  # fmt: skip


def hand_in(tmp_path: Path, options: Options, name: str = "study-1126030405-a1b2c3", nodes: int = 2) -> str:
    """Submit a job as `zeroscale sweep` does, and return its handle."""
    folder = tmp_path / "results" / "study" / "jobs" / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "job.json").write_text("{}")
    work = Work(name, folder, "bench.sweep.allocation", (), nodes, 1, time_limit_min=30)
    return submit(plan(work, options), options)


def get_state(options: Options, name: str = "study-1126030405-a1b2c3") -> JobState:
    return ask([name], options)[name, None]


def test_a_submitted_job_is_at_the_service_and_its_definition_in_the_store(
    service: VertexServer, options: Options, tmp_path: Path
) -> None:
    handle = hand_in(tmp_path, options)
    (job,) = service.find()
    assert handle == job.name == "projects/my-project/locations/us-central1/customJobs/1"
    assert job.display_name == "study-1126030405-a1b2c3"
    first, second = job.job_spec.worker_pool_specs
    assert (first.replica_count, second.replica_count) == (1, 1)
    assert first.machine_spec.machine_type == "n1-standard-4" and first.disk_spec.boot_disk_size_gb == 200
    assert job.job_spec.scheduling.timeout.total_seconds() == 30 * 60 + 120
    assert job.job_spec.scheduling.disable_retries and job.job_spec.scheduling.strategy.name == "STANDARD"
    stored = ObjectStore(f"file://{tmp_path}/bucket/study").list()
    assert set(stored) == {f"jobs/study-1126030405-a1b2c3/{name}" for name in ("job.json", "custom_job.json")}


@pytest.mark.parametrize(
    "fault",
    [
        AWAY,
        AWAY._replace(acts=True),
        Fault(grpc.StatusCode.DEADLINE_EXCEEDED, "deadline", acts=True),
        Fault(acts=True, delay_s=3.0),
        Fault(grpc.StatusCode.INTERNAL, "internal", acts=True),
    ],
    ids=["away", "answer lost", "deadline", "time-out", "internal"],
)
def test_a_submission_that_is_repeated_makes_one_job(
    fault: Fault, service: VertexServer, options: Options, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service.faults["Create"].append(fault)
    with caplog.at_level(logging.WARNING):
        handle = hand_in(tmp_path, options)
    assert [job.name for job in service.find()] == [handle]
    assert "next try in 0.05 s" in caplog.text
    assert hand_in(tmp_path, options) == handle, "a second command with the same job"
    assert len(service.find()) == 1


def test_a_second_job_that_a_late_list_causes_is_cancelled(
    service: VertexServer, options: Options, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service creates a first job, but its response is lost. Until the submitter has created a second job, the
    service's list of jobs lacks the first job."""
    created = vertex_service.Service.create

    def create_and_show(self: vertex_service.Service, job: object) -> object:
        try:
            return created(self, job)
        finally:
            service.hidden_s = 3600.0 if len(service.find()) == 1 else 0.0

    monkeypatch.setattr(vertex_service.Service, "create", create_and_show)
    service.faults["Create"].append(AWAY._replace(acts=True))
    handle = hand_in(tmp_path, options)
    assert [(job.name == handle, job.state.name) for job in service.find()] == [
        (True, "JOB_STATE_QUEUED"), (False, "JOB_STATE_CANCELLED"),
    ]  # fmt: skip
    assert get_state(options).handle == handle, "the first job of a name counts"


def test_a_service_that_stays_away_is_reported_and_the_definition_stays(
    service: VertexServer, options: Options, tmp_path: Path
) -> None:
    service.faults["Create"].extend([AWAY] * 4)
    with pytest.raises(SchedulerUnavailable, match=r"^Vertex AI: the service is away; try again later$"):
        hand_in(tmp_path, options)
    assert ObjectStore(f"file://{tmp_path}/bucket/study").list(), "the service may have accepted the job"


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (Fault(grpc.StatusCode.RESOURCE_EXHAUSTED, QUOTA), f"Vertex AI: {QUOTA}; wait for other jobs to end, "),
        (Fault(grpc.StatusCode.PERMISSION_DENIED, "Permission 'x' denied."), "Vertex AI: Permission 'x' denied; ask"),
        (Fault(grpc.StatusCode.NOT_FOUND, "no project"), "Vertex AI: no project; check launcher.project and"),
        (Fault(grpc.StatusCode.INVALID_ARGUMENT, "bad\nimage"), "Vertex AI: bad image"),
    ],
    ids=["quota", "permission", "project", "argument"],
)
def test_a_refusal_is_one_line_with_the_words_of_the_service(
    fault: Fault, told: str, service: VertexServer, options: Options, tmp_path: Path
) -> None:
    service.faults["Create"].append(fault)
    with pytest.raises(UserError) as refused:
        hand_in(tmp_path, options)
    assert str(refused.value).startswith(told) and "\n" not in str(refused.value)
    assert not isinstance(refused.value, SchedulerUnavailable)
    assert service.find() == [] and ObjectStore(f"file://{tmp_path}/bucket/study").list() == {}
    service.faults["List"].append(fault)
    with pytest.raises(UserError) as refused:
        get_state(options)
    assert str(refused.value).startswith(told)


def test_a_quota_of_requests_is_not_a_refusal(service: VertexServer, options: Options, tmp_path: Path) -> None:
    words = "Quota exceeded for quota metric 'Requests' and limit 'Requests per minute'"
    service.faults["Create"].append(Fault(grpc.StatusCode.RESOURCE_EXHAUSTED, words))
    assert hand_in(tmp_path, options) == service.find()[0].name


@pytest.mark.parametrize(
    ("state", "message", "expected"),
    [
        ("QUEUED", "", ("pending", None, "", None)),
        ("PENDING", "", ("pending", None, "", None)),
        ("RUNNING", "", ("running", None, "", None)),
        ("CANCELLING", "", ("running", None, "", None)),
        ("UPDATING", "", ("running", None, "", None)),
        ("SUCCEEDED", "", ("ended", None, "", 0)),
        ("CANCELLED", "", ("ended", "cancelled", "the job was cancelled", None)),
        ("EXPIRED", "", ("ended", "timeout", "the job reached its time limit", None)),
        ("FAILED", STOCKOUT, ("ended", "preempted", "a machine was withdrawn, or none was available", None)),
        ("FAILED", LOST, ("ended", "node_failure", "a machine of the job failed", None)),
        ("FAILED", "The replica workerpool0-0 exited with a non-zero status of 75.", ("ended", "error", "", 75)),
        ("FAILED", "The replica workerpool1-0 ran out-of-memory and exited with a non-zero status of 9(SIGKILL).",
         ("ended", "host_oom", "a machine of the job ran out of memory", 9)),
        ("FAILED", "something new", ("ended", "error", "", None)),
    ],
)  # fmt: skip
def test_a_state_of_the_service_is_a_phase_and_an_outcome(
    state: str, message: str, expected: tuple[object, ...], service: VertexServer, options: Options, tmp_path: Path
) -> None:
    handle = hand_in(tmp_path, options)
    if state in ("RUNNING", "FAILED"):
        service.set_state(handle, "RUNNING")
    service.set_state(handle, state, message, after_s=60.0)
    found = get_state(options)
    assert (found.phase, found.outcome, found.why, found.exit_code) == expected
    assert (found.state, found.nodes, found.handle) == (state, 2, handle)
    assert message in found.words and "\n" not in found.words
    if state == "FAILED":
        assert found.ended_at and found.started_at and found.ended_at - found.started_at == pytest.approx(60.0)


def test_a_job_that_is_cancelled_at_its_time_limit_has_timed_out(
    service: VertexServer, options: Options, tmp_path: Path
) -> None:
    handle = hand_in(tmp_path, options)
    service.set_state(handle, "RUNNING")
    service.set_state(handle, "CANCELLED", after_s=30 * 60 + 120)
    assert (get_state(options).outcome, get_state(options).why) == ("timeout", "the job reached its time limit")


def test_one_question_is_about_all_jobs_of_a_study_and_no_others(
    service: VertexServer, options: Options, tmp_path: Path
) -> None:
    names = [f"study-11260304{number:02}-abcdef" for number in range(5)]
    handles = [hand_in(tmp_path, options, name) for name in (*names, "study-other-1126030400-abcdef")]
    service.calls.clear()
    found = ask(names, options)
    assert {name: state.handle for (name, _), state in found.items()} == dict(zip(names, handles, strict=False))
    assert service.calls == ["List", "List"], "five jobs on two pages"
    assert ask(["study-1126999999-abcdef"], options) == {}, "unknown to the service"


def test_jobs_are_cancelled_and_those_that_ended_are_ignored(
    service: VertexServer, options: Options, tmp_path: Path
) -> None:
    handles = [hand_in(tmp_path, options, f"study-112603040{number}-abcdef") for number in range(3)]
    service.set_state(handles[0], "RUNNING")
    service.set_state(handles[0], "SUCCEEDED")
    cancel_all([*handles, handles[1], handles[2].replace("customJobs/3", "customJobs/99")], options)
    assert [job.state.name for job in service.find()] == ["JOB_STATE_SUCCEEDED", *["JOB_STATE_CANCELLED"] * 2]
    service.faults["Cancel"].append(Fault(grpc.StatusCode.PERMISSION_DENIED, "denied"))
    with pytest.raises(UserError, match=r"^Vertex AI: denied; ask for the role"):
        cancel_all(handles[:1], options)


def test_an_accelerator_that_the_client_does_not_know_is_refused_in_one_line(
    service: VertexServer, options: Options, tmp_path: Path
) -> None:
    later = options.model_copy(update={"accelerator_type": "NVIDIA_LATER", "machine_type": "z9-gpu-1"})
    with pytest.raises(UserError, match=r"^the request of a job: .*NVIDIA_LATER.*; correct the value, or install"):
        hand_in(tmp_path, later)
    assert service.find() == []


def test_a_missing_package_is_one_line_with_the_command_that_installs_it(
    options: Options, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(vertex_service.importlib, "import_module", refuse)
    other = options.model_copy(update={"endpoint": "127.0.0.1:9"})
    with pytest.raises(UserError, match=r"needs the package google-cloud-aiplatform .*; pip install 'zeroscale\[ver"):
        ask(["study-1"], other)
