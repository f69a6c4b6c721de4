import json
import os
from pathlib import Path
from typing import Any

import pytest

from bench import config, store
from bench.errors import UserError
from bench.machine import Machine
from bench.record import Circumstance, Environment, EnvironmentClass, Outcome, OutcomeKind, RunRecord
from bench.spec import RunSpec, config_id


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    return config.request([("model", "tiny")]).spec


def circumstance(repeat: int = 0, machine: str = "cpu") -> Circumstance:
    return Circumstance(study="s", repeat=repeat, attempt=0, machine=Machine(name=machine))


def record(spec: RunSpec, kind: OutcomeKind = "ok", environment_id: str = "e1", machine: str = "cpu") -> RunRecord:
    classification = EnvironmentClass(device="some", devices_per_node=1)
    return RunRecord(
        config_id=config_id(spec),
        spec=spec,
        circumstance=circumstance(machine=machine),
        environment=Environment(environment_id=environment_id, classification=classification),
        outcome=Outcome(kind=kind),
    )


def test_a_claimed_folder_is_never_claimed_again(tmp_path: Path) -> None:
    names = [store.claim(tmp_path / "id", repeat).folder.name for repeat in (0, 0, 1, 0)]
    assert names == ["0.0", "0.1", "1.0", "0.2"]


def test_an_attempt_starts_with_its_spec_its_circumstance_and_room_for_its_record(
    tmp_path: Path, spec: RunSpec
) -> None:
    store.claim(tmp_path, 0)
    attempt = store.open_attempt(tmp_path, spec, circumstance())
    assert RunSpec.model_validate_json((attempt.folder / store.SPEC).read_bytes()) == spec
    written = Circumstance.model_validate_json((attempt.folder / store.CIRCUMSTANCE).read_bytes())
    assert written.attempt == attempt.attempt == 1
    text = store.to_json(record(spec))
    inode = (attempt.folder / ".record.json.reserved").stat().st_ino
    store.fill(attempt.folder / store.RECORD, text)
    assert (attempt.folder / store.RECORD).read_bytes() == text
    assert (attempt.folder / store.RECORD).stat().st_ino == inode, "written into the reserved blocks"
    store.release(attempt.folder)
    assert not list(attempt.folder.glob(".*"))


def test_a_reserve_that_is_too_small_is_not_used(tmp_path: Path) -> None:
    store.reserve(tmp_path / "file", 10)
    store.fill(tmp_path / "file", b"x" * 100)
    assert (tmp_path / "file").read_bytes() == b"x" * 100
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    store.write_atomically(path, b"old")

    def no_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_disk)
    with pytest.raises(OSError, match="No space"):
        store.write_atomically(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("kind", "is_answer"), [("ok", True), ("oom", True), ("invalid", True), ("hang", False), ("cancelled", False)]
)
def test_final_outcomes_answer_a_point_and_others_are_tried_again(
    tmp_path: Path, spec: RunSpec, kind: OutcomeKind, is_answer: bool
) -> None:
    attempt = store.open_attempt(tmp_path, spec, circumstance())
    store.fill(attempt.folder / store.RECORD, store.to_json(record(spec, kind)))
    assert (store.answered(tmp_path, 0, "cpu", "e1") is not None) is is_answer


def test_an_answer_holds_for_its_repeat_machine_and_environment_class_only(tmp_path: Path, spec: RunSpec) -> None:
    attempt = store.open_attempt(tmp_path, spec, circumstance())
    store.fill(attempt.folder / store.RECORD, store.to_json(record(spec)))
    assert store.answered(tmp_path, 0, "cpu", None)
    assert not store.answered(tmp_path, 1, "cpu", "e1")
    assert not store.answered(tmp_path, 0, "h200", "e1")
    assert not store.answered(tmp_path, 0, "cpu", "after an upgrade")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("not json", "not a zeroscale record"),
        ("[1]", "not a zeroscale record"),
        ('{"a": 1}', "not a zeroscale record"),
        ('{"schema_version": 99}', "schema version 99 is newer than 1"),
        ('{"schema_version": 1}', "config_id: Field required"),
        ("", "not a zeroscale record"),
    ],
)
def test_a_foreign_or_corrupt_file_is_named_with_what_is_wrong(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / store.RECORD).write_text(content)
    with pytest.raises(store.Unreadable, match=why) as caught:
        store.read_record(tmp_path / store.RECORD)
    assert str(tmp_path) in str(caught.value)


def test_a_newer_record_is_not_read_as_one_of_ours_even_where_it_looks_like_one(tmp_path: Path, spec: RunSpec) -> None:
    path = tmp_path / store.RECORD
    store.write_json(path, record(spec).model_copy(update={"schema_version": 99}))
    with pytest.raises(store.Unreadable, match="schema version 99 is newer"):
        store.read_record(path)


def test_a_folder_that_is_not_there_is_a_users_error() -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        list(store.find_records([Path("/nowhere/at/all")]))


def test_records_read_back_what_was_written(tmp_path: Path, spec: RunSpec) -> None:
    path = tmp_path / store.RECORD
    store.write_json(path, record(spec))
    assert store.read_record(path) == record(spec)
    plain: dict[str, Any] = json.loads(path.read_text())
    assert plain["spec"]["batch"]["global"] == spec.global_batch, "files speak the user's names"
