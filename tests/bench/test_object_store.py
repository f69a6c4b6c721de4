"""Tests of object stores: the creation of objects, and copies of a study's folder. The tests use three stores: a
folder, fsspec's memory file system, and an emulated bucket of Google Cloud Storage."""

import contextlib
import json
import logging
import multiprocessing
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ended_well import observed
from storage_emulator import emulated_bucket

from bench.config import compose
from bench.core import object_store, store, study_store
from bench.core.errors import UserError
from bench.core.machine import Machine
from bench.core.object_store import ObjectStore, StoreUnavailable
from bench.core.record import Circumstance, Environment, EnvironmentClass, Outcome, RunRecord
from bench.core.spec import RunSpec, config_id
from bench.core.study_store import CLAIM, StudyStore


@pytest.fixture(params=["file", "memory", "gs"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "file":
        yield f"file://{tmp_path}/bucket/s"
    elif request.param == "gs":
        with emulated_bucket() as (bucket, _):
            yield f"{bucket}/s"
    else:
        memory = pytest.importorskip("fsspec").filesystem("memory")
        name = f"bucket-{secrets.token_hex(4)}"
        yield f"memory://{name}/s"
        memory.rm(f"/{name}", recursive=True)


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    return compose.compose_request([("model", "tiny"), ("devices_per_node", 2)]).spec


def circumstance(job: str = "a", repeat: int = 0) -> Circumstance:
    launcher = {"name": "slurm", "job": job, "task": None, "restart": 0}
    return Circumstance(study="s", repeat=repeat, attempt=0, machine=Machine(name="cpu"), launcher=launcher)


def record(folder: Path) -> RunRecord:
    spec = store.read_value(folder / store.SPEC, RunSpec)
    classification = EnvironmentClass(device="some", devices_per_node=1)
    return RunRecord(
        config_id=config_id(spec),
        spec=spec,
        circumstance=store.read_value(folder / store.CIRCUMSTANCE, Circumstance),
        environment=Environment(environment_id="e1", classification=classification),
        outcome=Outcome(kind="ok"),
        observations=observed(),
    )


def finish(folder: Path) -> None:
    """Write the record of an attempt (one try at a run) and the table of its steps into the attempt's folder, as a run
    does at its end."""
    (folder / store.STEPS).write_bytes(b"steps")
    store.write_reserved(folder / store.RECORD, store.to_json(record(folder)))
    store.release_reserved(folder)


def test_an_object_is_created_once_and_replaced_by_write(url: str) -> None:
    objects = ObjectStore(url)
    assert objects.list() == {}
    assert objects.create("id/0.0/claim.json", b"first")
    assert not objects.create("id/0.0/claim.json", b"second")
    assert objects.create("id/0.0/claim.json", b"first"), "the repetition of a call whose answer was lost"
    assert objects.read("id/0.0/claim.json") == b"first"
    objects.write("id/0.0/heartbeat.json", b"1")
    objects.write("id/0.0/heartbeat.json", b"two")
    assert objects.read("id/0.0/heartbeat.json") == b"two"
    objects.write("idle", b"")
    assert {name: info.size for name, info in objects.list("id").items()} == {
        "id/0.0/claim.json": 5,
        "id/0.0/heartbeat.json": 3,
    }
    assert abs(objects.stat("idle").modified_at - time.time()) < 5
    objects.remove("idle")
    objects.remove("idle")
    assert "idle" not in objects.list()
    with pytest.raises(FileNotFoundError):
        objects.read("idle")


@pytest.mark.parametrize(
    ("url", "rule"),
    [
        ("bucket/s", "not the URL of an object store"),
        ("gs:///s", "not the URL"),
        ("file://relative/s", "not the URL"),
        ("ftp://host/s", "not the URL"),
        ("s3://bucket/s", "the package s3fs for this object store is not installed"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_in_one_line(url: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(object_store._PACKAGES, "s3", "s3fs_missing")
    with pytest.raises(UserError, match=rule.replace("s3fs", "s3fs_missing")) as raised:
        ObjectStore(url)
    assert "\n" not in str(raised.value) and raised.value.remedy


def test_a_missing_package_is_named_with_a_command_that_a_shell_accepts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(UserError) as raised:
        ObjectStore("gs://bucket/s")
    assert raised.value.remedy == "pip install 'zeroscale[vertex]'"


class _Denied(Exception):
    code = 403


@pytest.mark.parametrize(
    ("error", "rule"),
    [
        (_Denied("Insufficient\npermission"), "access is denied (_Denied: Insufficient)"),
        (PermissionError(13, "Permission denied"), "access is denied"),
        (type("DefaultCredentialsError", (Exception,), {})("none found"), "no valid credentials"),
        (FileNotFoundError("b"), "no such bucket"),
    ],
)
def test_a_refusal_is_reported_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, rule: str
) -> None:
    def refuse(*arguments: Any) -> None:
        raise error

    objects = ObjectStore(f"file://{tmp_path}/s")
    monkeypatch.setattr(objects._backend, "write", refuse)
    begin = time.monotonic()
    with pytest.raises(UserError) as raised:
        objects.write("a", b"")
    assert rule in str(raised.value) and "\n" not in str(raised.value)
    assert not isinstance(raised.value, StoreUnavailable) and time.monotonic() - begin < 1


def test_calls_are_repeated_until_the_store_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file takes the place of the bucket's folder for some time, so that every access fails, as it does without a
    network."""
    bucket, naps = tmp_path / "bucket", list[float]()
    bucket.write_bytes(b"")
    caplog.set_level(logging.WARNING)

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            bucket.unlink()

    monkeypatch.setattr(time, "sleep", nap)
    assert ObjectStore(f"file://{bucket}/s").create("a/record.json", b"kept")
    assert len(naps) == 3 and (bucket / "s/a/record.json").read_bytes() == b"kept"
    begin = f"file://{bucket}/s: does not respond (NotADirectoryError: "
    assert [message.startswith(begin) for message in caplog.messages] == [True] * 3
    assert caplog.messages[1].endswith("; next try in 1 s; stop with Ctrl-C")


def test_a_store_that_stays_away_is_unavailable_after_its_patience(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bucket").write_bytes(b"")
    now, naps = [0.0], list[float]()

    def nap(seconds: float) -> None:
        naps.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(time, "sleep", nap)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "time", lambda: 1e9 + now[0])
    objects = ObjectStore(f"file://{tmp_path}/bucket/s", patience_s=10)
    for call in (lambda: objects.list(), lambda: objects.write("a", b"")):
        before = now[0]
        with pytest.raises(StoreUnavailable, match="does not respond"):
            call()
        assert 5 < now[0] - before <= 10
    objects.give_up_at = time.time() + 300
    before = now[0]
    with pytest.raises(StoreUnavailable):
        objects.write("a", b"")
    assert 285 < now[0] - before <= 300
    now[0] += 100  # the job has ended, and the last try to reach the store is made
    naps.clear()
    with pytest.raises(StoreUnavailable):
        objects.write("a", b"")
    with pytest.raises(StoreUnavailable):
        objects.without_patience().write("a", b"")
    assert not naps


def claim_many(url: str, folder: Path, plain: str, job: str, count: int) -> None:
    """Create `count` attempts of the job `job` in the store. Tests run this function in several processes.

    An attempt is one try at a run. `plain` is the spec of these runs as JSON.
    """
    spec = RunSpec.model_validate_json(plain)
    study = StudyStore(ObjectStore(url), folder)
    for _ in range(count):
        study.open_attempt(folder / config_id(spec), spec, circumstance(job))


@pytest.mark.parametrize("kind", ["file", pytest.param("gs", marks=pytest.mark.processes)])
def test_parallel_processes_claim_different_attempts(tmp_path: Path, spec: RunSpec, kind: str) -> None:
    with emulated_bucket() if kind == "gs" else contextlib.nullcontext((f"file://{tmp_path}/bucket", None)) as (at, _):
        claim_in_parallel(f"{at}/s", tmp_path, spec)


def claim_in_parallel(url: str, tmp_path: Path, spec: RunSpec) -> None:
    count, jobs = 8, ("a", "b", "c")
    # Threads of gcsfs in this process do not survive a fork.
    context: Any = multiprocessing.get_context("spawn" if url.startswith("gs:") else "fork")
    processes = [
        context.Process(target=claim_many, args=(url, tmp_path / job, spec.model_dump_json(), job, count))
        for job in jobs
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    claims = [name for name in ObjectStore(url).list() if name.endswith(CLAIM)]
    assert sorted(claims) == sorted(f"{config_id(spec)}/0.{number}/{CLAIM}" for number in range(count * len(jobs)))
    claimed = [json.loads(ObjectStore(url).read(name))[store.CIRCUMSTANCE] for name in claims]
    counts = [sum(json.loads(text)["launcher"]["job"] == job for text in claimed) for job in jobs]
    assert counts == [count] * len(jobs)


def test_a_claim_describes_its_attempt_at_once(url: str, tmp_path: Path, spec: RunSpec) -> None:
    job, submitter = (StudyStore(ObjectStore(url), tmp_path / name) for name in ("node", "submitter"))
    opened = job.open_attempt(job.folder / config_id(spec), spec, circumstance())
    submitter.sync()
    seen = submitter.folder / config_id(spec) / "0.0"
    for name in (store.SPEC, store.CIRCUMSTANCE):
        assert (seen / name).read_bytes() == (opened.folder / name).read_bytes()
    assert abs((seen / store.CIRCUMSTANCE).stat().st_mtime - time.time()) < 5
    assert [attempt.outcome for attempt in store.list_attempts(seen.parent)] == [None]


def test_a_finished_attempt_is_pulled_whole_and_its_record_comes_last(
    url: str, tmp_path: Path, spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, submitter = (StudyStore(ObjectStore(url), tmp_path / name) for name in ("node", "submitter"))
    folder = job.open_attempt(job.folder / config_id(spec), spec, circumstance()).folder
    finish(folder)
    for name in ("checkpoint-8/weights", ".checkpoint-9/weights", "model/weights"):
        (folder / name).parent.mkdir()
        (folder / name).write_bytes(b"large")
    written: list[str] = []
    watch(monkeypatch, job.objects, written.append)
    job.push_attempt(folder)
    names = [name.removeprefix(f"{config_id(spec)}/0.0/") for name in written]
    assert sorted(names) == ["circumstance.json", "model/weights", "record.json", "spec.json", "steps.parquet"]
    assert names[-1] == store.RECORD
    replaced: list[str] = []
    write = store.write_atomically

    def note(path: Path, content: bytes, **options: Any) -> None:
        replaced.extend([path.name] * ("modified_at" in options))
        write(path, content, **options)

    monkeypatch.setattr(store, "write_atomically", note)
    submitter.sync()
    pulled = submitter.folder / config_id(spec) / "0.0"
    assert replaced[0] == CLAIM and replaced[-1] == store.RECORD
    assert sorted(path.name for path in pulled.iterdir()) == sorted({CLAIM, *names} - {"model/weights"})
    assert (pulled / store.RECORD).read_bytes() == (folder / store.RECORD).read_bytes()
    replaced.clear()
    submitter.sync()
    assert replaced == [], "nothing is read twice"


def watch(monkeypatch: pytest.MonkeyPatch, objects: ObjectStore, note: Callable[[str], object]) -> None:
    """From now on, call `note` before each write to the store `objects`. The argument of `note` is the name of the
    object to be written."""
    backend = objects._backend
    create, write = backend.create, backend.write
    monkeypatch.setattr(backend, "create", lambda name, content: (note(name), create(name, content))[1])
    monkeypatch.setattr(backend, "write", lambda name, content: (note(name), write(name, content))[1])


def test_a_lost_attempt_gets_one_record_and_the_first_counts(url: str, tmp_path: Path, spec: RunSpec) -> None:
    """The job of a run seems to be killed, so two submitting processes each write a record of the lost run. In fact the
    job still runs, and later writes a third record. The job and both processes must see only the record that was
    written first."""
    job, one, other = (StudyStore(ObjectStore(url), tmp_path / name) for name in ("node", "one", "other"))
    folder = job.open_attempt(job.folder / config_id(spec), spec, circumstance()).folder
    place = Path(config_id(spec), "0.0")
    for study, reason in ((one, "first"), (other, "second")):
        study.sync()
        store.finalize(study.folder / place, Outcome(kind="node_failure", reason=reason))
    one.sync()
    other.sync()
    finish(folder)
    job.push_attempt(folder)
    reasons = [store.read_record(study.folder / place / store.RECORD).outcome.reason for study in (one, other, job)]
    assert reasons == ["first"] * 3
    one.sync()
    assert store.read_record(one.folder / place / store.RECORD).outcome.reason == "first"


def test_an_attempt_of_the_submitter_is_moved_if_a_job_has_its_number(url: str, tmp_path: Path, spec: RunSpec) -> None:
    job, submitter = (StudyStore(ObjectStore(url), tmp_path / name) for name in ("node", "submitter"))
    place = Path(config_id(spec))
    opened = store.open_attempt(submitter.folder / place, spec, circumstance("submitter"))
    store.finalize(opened.folder, Outcome(kind="infeasible", reason="too large"), "predicted")
    finish(job.open_attempt(job.folder / place, spec, circumstance("job")).folder)
    job.push_attempt(job.folder / place / "0.0")
    submitter.sync()
    for folder in (submitter.folder, job.folder):
        if folder == job.folder:
            job.pull_attempts(place.name)
        found = [(attempt.attempt, attempt.outcome, attempt.job) for attempt in store.list_attempts(folder / place)]
        assert found == [(0, "ok", "job"), (1, "infeasible", "submitter")]
    moved = store.read_record(job.folder / place / "0.1" / store.RECORD)
    assert moved.circumstance.attempt == 1 and moved.outcome.reason == "too large"


def test_files_of_jobs_and_sweeps_reach_both_submitters(url: str, tmp_path: Path) -> None:
    one, other = (StudyStore(ObjectStore(url), tmp_path / name) for name in ("one", "other"))
    files = ("jobs/s-1/job.json", "jobs/s-1/handle", "sweeps/1.json", "excluded/n1.json")
    for name in files:
        (one.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (one.folder / name).write_text(name)
    (one.folder / "jobs/s-1/meeting-1.0.json").write_text("secret")
    (one.folder / "report").mkdir()
    (one.folder / "report/index.html").write_text("page")
    one.sync()
    other.sync()
    assert sorted(one.objects.list()) == sorted(files)
    assert {name: (other.folder / name).read_text() for name in files} == {name: name for name in files}
    # The first submitting process that notices the end of an allocation writes it to the store.
    later = time.time() + 2
    (other.folder / files[0]).write_text("ended")
    os.utime(other.folder / files[0], (later, later))
    other.sync()
    one.sync()
    assert (one.folder / files[0]).read_text() == "ended"
    one.withdraw_job(one.folder / "jobs/s-1")
    assert sorted(one.objects.list()) == ["excluded/n1.json", "sweeps/1.json"]


def test_a_job_pulls_its_own_files_once(url: str, tmp_path: Path) -> None:
    submitter, node = (StudyStore(ObjectStore(url), tmp_path / name) for name in ("submitter", "node"))
    folder = submitter.folder / "jobs/s-1"
    folder.mkdir(parents=True)
    (folder / "job.json").write_text("{}")
    submitter.push_job(folder)
    node.pull_job(node.folder / "jobs/s-1")
    (node.folder / "jobs/s-1/job.log").write_text("short")
    node.push(node.folder / "jobs/s-1/job.log", node.folder / "jobs/s-1/gone")
    (node.folder / "jobs/s-1/job.log").write_text("longer than before")
    node.pull_job(node.folder / "jobs/s-1")
    assert (node.folder / "jobs/s-1/job.log").read_text() == "longer than before"
    assert sorted(submitter.objects.list()) == ["jobs/s-1/job.json", "jobs/s-1/job.log"]


def test_invalid_claim_is_refused_in_one_line(tmp_path: Path) -> None:
    study = StudyStore(ObjectStore(f"file://{tmp_path}/bucket/s"), tmp_path / "here")
    study.objects.write("id/0.0/claim.json", b"[]")
    with pytest.raises(UserError, match="not a claim file of zeroscale"):
        study.sync()
    shutil.rmtree(tmp_path / "bucket")
    (tmp_path / "here").rename(tmp_path / "there")
    (tmp_path / "here").write_bytes(b"")
    with pytest.raises(UserError, match="cannot be written"):
        study_store.sync(tmp_path / "here", f"file://{tmp_path}/bucket/s")


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        ((("learning.stop_after", 64),), "no other job can resume from them"),
        ((("learning.checkpoint_every", 64), ("nodes", 2)), "each of the 2 nodes would keep its part"),
        ((("learning.checkpoint_every", 64),), ""),
    ],
)
def test_a_checkpoint_that_another_node_needs_is_refused(overrides: tuple[tuple[str, Any], ...], rule: str) -> None:
    learns = [("data", "text"), ("learning.tokens", 4096)]
    spec = compose.compose_request([("model", "gpt2_tiny"), ("devices_per_node", 1), *learns, *overrides]).spec
    if rule:
        with pytest.raises(UserError, match=rule):
            study_store.check_spec(spec)
    else:
        study_store.check_spec(spec)


@pytest.mark.parametrize(
    ("content", "rule"), [(None, "no such file"), ("{}", "has no credentials"), ("{", "has no credentials")]
)
def test_unusable_credentials_file_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None, rule: str
) -> None:
    pytest.importorskip("gcsfs")
    if content is not None:
        (tmp_path / "key.json").write_text(content)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "key.json"))
    with pytest.raises(UserError, match=f"^GOOGLE_APPLICATION_CREDENTIALS=.*key.json: {rule}; correct the path"):
        ObjectStore("gs://my-bucket/study")
