import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from ended_well import observed

from bench.config import compose
from bench.core import store
from bench.core.errors import UserError
from bench.core.files import is_disk_full
from bench.core.machine import Machine
from bench.core.record import Circumstance, Environment, EnvironmentClass, Outcome, OutcomeKind, RunRecord
from bench.core.spec import RunSpec, config_id


@pytest.fixture(scope="module")
def spec() -> RunSpec:
    return compose.compose_request([("model", "tiny"), ("devices_per_node", 2)]).spec


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
        observations=observed() if kind == "ok" else None,
    )


def test_claimed_folder_cannot_be_claimed_again(tmp_path: Path) -> None:
    names = [store.create_attempt(tmp_path / "id", repeat).folder.name for repeat in (0, 0, 1, 0)]
    assert names == ["0.0", "0.1", "1.0", "0.2"]


def test_new_attempt_has_spec_circumstance_and_reserved_space(tmp_path: Path, spec: RunSpec) -> None:
    store.create_attempt(tmp_path, 0)
    attempt = store.open_attempt(tmp_path, spec, circumstance())
    assert RunSpec.model_validate_json((attempt.folder / store.SPEC).read_bytes()) == spec
    written = Circumstance.model_validate_json((attempt.folder / store.CIRCUMSTANCE).read_bytes())
    assert written.attempt == attempt.attempt == 1
    text = store.to_json(record(spec))
    inode = (attempt.folder / ".record.json.reserved").stat().st_ino
    store.write_reserved(attempt.folder / store.RECORD, text)
    assert (attempt.folder / store.RECORD).read_bytes() == text
    assert (attempt.folder / store.RECORD).stat().st_ino == inode, "written into the reserved blocks"
    store.release_reserved(attempt.folder)
    assert not list(attempt.folder.glob(".*"))


def test_reserved_file_is_unused_if_too_small(tmp_path: Path) -> None:
    store.reserve(tmp_path / "file", 10)
    store.write_reserved(tmp_path / "file", b"x" * 100)
    assert (tmp_path / "file").read_bytes() == b"x" * 100
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("room", [True, False], ids=["no hard links", "no inodes either"])
def test_record_is_written_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool) -> None:
    """Hard links fail on exFAT, on some network file systems, and if the table of inodes is full. The record must be
    written without them.

    Even so, if two processes write the same record, the record of the first must be kept.
    """

    def refused(*paths: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    def full(*arguments: Any) -> int:
        raise OSError(28, "No space left on device")

    store.reserve(tmp_path / "file", 100)
    monkeypatch.setattr(os, "link", refused)
    if not room:
        monkeypatch.setattr(os, "open", full)
    assert store.write_reserved(tmp_path / "file", b"first")
    monkeypatch.undo()
    monkeypatch.setattr(os, "link", refused)
    assert not store.write_reserved(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_bytes() == b"first"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_link_repeated_by_a_network_file_system_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system may create a link, lose the reply, and try to create the link again. The second try fails,
    but the record is written."""
    link = os.link

    def twice(*paths: Path) -> None:
        link(*paths)
        link(*paths)

    monkeypatch.setattr(os, "link", twice)
    assert store.write_reserved(tmp_path / "file", b"first")
    monkeypatch.undo()
    assert not store.write_reserved(tmp_path / "file", b"second")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"first"]


def test_folder_is_synced_after_the_record_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[bool, list[str]]] = []

    def note(descriptor: int) -> None:
        synced.append((stat.S_ISDIR(os.fstat(descriptor).st_mode), [path.name for path in tmp_path.iterdir()]))

    monkeypatch.setattr(os, "fsync", note)
    store.write_reserved(tmp_path / "file", b"content")
    assert synced[-1] == (True, ["file"]) and not synced[0][0]


def test_failed_write_leaves_only_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    ("uninspected", "expected"),
    [(store.UNINSPECTED, f"{store.UNINSPECTED}: rank 1 raised"), (None, None), ("another reason", "another reason")],
)
def test_later_failure_of_a_measured_run_changes_only_uninspected(
    tmp_path: Path, spec: RunSpec, uninspected: str | None, expected: str | None
) -> None:
    seen = observed().model_copy(update={"uninspected": uninspected})
    store.write_json(tmp_path / store.RECORD, record(spec).model_copy(update={"observations": seen}))
    concluded = store.finalize(tmp_path, Outcome(kind="error", reason="rank 1 raised"))
    assert concluded == store.read_record(tmp_path / store.RECORD)
    assert concluded.outcome.kind == "ok"
    assert concluded.observations and concluded.observations.uninspected == expected


def test_supervisor_adds_pauses_to_the_record_of_a_rank(tmp_path: Path, spec: RunSpec) -> None:
    claimed = store.open_attempt(tmp_path, spec, circumstance())
    measured = record(spec).model_copy(update={"observations": observed()})
    store.write_reserved(claimed.folder / store.RECORD, store.to_json(measured))
    assert store.finalize(claimed.folder, Outcome(kind="error")) == measured
    concluded = store.finalize(claimed.folder, Outcome(kind="error"), paused_s=15.23)
    assert concluded.outcome == Outcome(kind="ok", evidence={"paused_s": 15.2})
    [attempt] = store.list_attempts(tmp_path)
    assert attempt.outcome == "ok" and attempt.paused_s == concluded.outcome.paused_s == 15.2


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("not json", "not a zeroscale record"),
        ("[1]", "not a zeroscale record"),
        ('{"a": 1}', "not a zeroscale record"),
        ('{"schema_version": 99}', "schema version 99 is newer than 3"),
        ('{"schema_version": 1}', "config_id: is required and missing"),
        ('{"schema_version": 2}', "config_id: is required and missing"),
        ('{"schema_version": 0}', "not a zeroscale record"),
        ('{"schema_version": true}', "not a zeroscale record"),
        ('{"schema_version": "1"}', "not a zeroscale record"),
        ("", "not a zeroscale record"),
    ],
)
def test_foreign_or_corrupt_file_is_named_with_its_fault(tmp_path: Path, content: str, why: str) -> None:
    (tmp_path / store.RECORD).write_text(content)
    with pytest.raises(store.Unreadable, match=why) as caught:
        store.read_record(tmp_path / store.RECORD)
    assert str(tmp_path) in str(caught.value)


def test_record_of_a_newer_schema_version_is_unreadable(tmp_path: Path, spec: RunSpec) -> None:
    path = tmp_path / store.RECORD
    store.write_json(path, record(spec).model_copy(update={"schema_version": 99}))
    with pytest.raises(store.Unreadable, match="schema version 99 is newer"):
        store.read_record(path)


def test_missing_folder_is_a_user_error() -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        list(store.find_records([Path("/nowhere/at/all")]))


def test_record_is_read_as_written(tmp_path: Path, spec: RunSpec) -> None:
    path = tmp_path / store.RECORD
    store.write_json(path, record(spec))
    assert store.read_record(path) == record(spec)
    plain: dict[str, Any] = json.loads(path.read_text())
    assert plain["spec"]["batch"]["global"] == spec.global_batch, "files speak the user's names"


# -- records that cannot be read


def put(folder: Path, content: bytes) -> Path:
    path = folder / store.RECORD
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def whole(spec: RunSpec, **changes: Any) -> bytes:
    """Return the content of a file with a record of about 6 KiB. `changes` replace fields of the record."""
    plain = json.loads(store.to_json(record(spec).model_copy(update={"observations": observed((0.1,) * 60)})))
    return json.dumps(plain | changes, indent=1).encode() + b"\n"


def test_truncated_record_has_no_outcome_and_a_reason(tmp_path: Path, spec: RunSpec) -> None:
    for steps in (5, 600):
        content = store.to_json(record(spec).model_copy(update={"observations": observed((0.1,) * steps)}))
        put(tmp_path / "0.0", content)
        assert [found.outcome for found in store.list_attempts(tmp_path)] == ["ok"]
        for length in (0, 1, *range(100, len(content) - 3, len(content) // 40)):
            put(tmp_path / "0.0", content[:length])
            (found,) = store.list_attempts(tmp_path)
            assert (found.outcome, found.unreadable) == (None, "not a zeroscale record"), f"{length} bytes"


@pytest.mark.parametrize(
    "changes",
    [
        {"environment": "x"},
        {"environment": []},
        {"environment": {"environment_id": 5}},
        {"outcome": {"kind": [], "reason": ""}},
        {"outcome": {"kind": "fine", "reason": ""}},
        {"outcome": {"kind": "ok", "reason": None}},
        {"outcome": None},
        {"circumstance": {"machine": {"name": {}}}},
        {"circumstance": 5},
        {"observations": None},
    ],
    ids=str,
)
def test_record_with_an_invalid_outcome_is_unreadable(tmp_path: Path, spec: RunSpec, changes: dict[str, Any]) -> None:
    put(tmp_path / "0.0", whole(spec))
    assert [found.outcome for found in store.list_attempts(tmp_path)] == ["ok"]
    put(tmp_path / "0.0", whole(spec, **changes))
    (found,) = store.list_attempts(tmp_path)
    assert found.outcome is None and found.unreadable


def test_only_regular_files_are_read(tmp_path: Path, spec: RunSpec) -> None:
    """Reading a named pipe would wait forever, /dev/zero never ends, and a symbolic link may point out of the
    folder."""
    good = put(tmp_path / "elsewhere", whole(spec))
    for number, what in enumerate((good, Path("/dev/zero"), tmp_path / "nowhere", Path("record.json"))):
        (tmp_path / f"{number}.0").mkdir()
        (tmp_path / f"{number}.0" / store.RECORD).symlink_to(what)
    (tmp_path / "4.0" / store.RECORD).mkdir(parents=True)
    (tmp_path / "5.0").mkdir()
    os.mkfifo(tmp_path / "5.0" / store.RECORD)
    found = store.list_attempts(tmp_path)
    assert [attempt.outcome for attempt in found] == [None] * 6
    assert ["link" in attempt.unreadable for attempt in found] == [True] * 4 + [False] * 2
    assert [attempt.unreadable for attempt in found[4:]] == ["is not a regular file"] * 2
    for attempt in found:
        with pytest.raises(store.Unreadable, match=attempt.unreadable):
            store.read_record(attempt.folder / store.RECORD)


def test_attempt_with_an_unreadable_spec_is_not_finalized(tmp_path: Path, spec: RunSpec) -> None:
    attempt = store.open_attempt(tmp_path, spec, circumstance())
    (attempt.folder / store.SPEC).write_text("{}")
    with pytest.raises(store.Unreadable, match=r"spec.json: model: is required and missing"):
        store.finalize(attempt.folder, Outcome(kind="error"))
    assert not (attempt.folder / store.RECORD).exists()


def test_full_disk_is_recognised_by_the_cause_of_an_error() -> None:
    assert is_disk_full(OSError(errno.ENOSPC, "No space left on device"))
    assert not is_disk_full(OSError(errno.EIO, "Input/output error")) and not is_disk_full(UserError("x", "y"))
    quota = UserError("folder", "cannot reserve 5 bytes for the record")
    quota.__cause__ = OSError(errno.EDQUOT, "Disk quota exceeded")
    assert is_disk_full(quota)


def test_point_with_an_older_protocol_is_not_measured(tmp_path: Path, spec: RunSpec) -> None:
    plain = spec.model_dump(mode="json", by_alias=True) | {"measure": {"width": 0.02}}
    older = RunSpec.model_validate(plain)
    with pytest.raises(UserError, match=r"protocol is from an older version.*; plan the study again"):
        store.open_attempt(tmp_path, older, circumstance())
    assert list(tmp_path.iterdir()) == []
