"""Tests that an archive of a results folder gives the same results as the folder itself."""

import io
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from records import failed, run, save, spec

import analysis
from analysis import reading, results
from analysis.reading import consolidated, walk
from bench.cli import main
from bench.core import files, store

RECORDED = Path(__file__).parents[1] / "data" / "runs.zip"


@pytest.fixture(autouse=True)
def _keep_rows_of_any_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clock = time.time_ns
    monkeypatch.setattr(consolidated, "LEAST", 1)
    monkeypatch.setattr(walk, "time_ns", lambda: clock() + 10**10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def packed(folder: Path, out: Path) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_bytes(files.pack(files.read_whole(folder)))
    return out


def answers(path: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the exit codes and outputs of several subcommands (such as `table`) for a results folder or archive. In
    the outputs, the path of the folder or archive is replaced by SET, so that outputs can be compared."""
    asked = [("table", str(path), "--format", "csv"), ("claims", str(path)), ("compare", str(path), str(path))]
    return [f"{main(words)} {capsys.readouterr().out}".replace(str(path), "SET") for words in asked]


def test_folder_and_archive_give_equal_output_of_every_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files.unpack(RECORDED, tmp_path / "unpacked")
    archive = packed(tmp_path / "unpacked", tmp_path / "elsewhere" / "runs.zip")
    assert archive.read_bytes() == RECORDED.read_bytes(), "equal files make equal archives"
    of_folder = answers(tmp_path / "unpacked", capsys)
    assert answers(archive, capsys) == of_folder
    assert answers(archive.parent, capsys) == of_folder
    assert answers(archive / "testbed", capsys) == answers(tmp_path / "unpacked" / "testbed", capsys)
    assert len(analysis.open_study(archive / "smoke").table) == 20


def test_records_read_from_an_archive_equal_those_from_its_folder(tmp_path: Path) -> None:
    files.unpack(RECORDED, tmp_path)
    ways = [path.relative_to(tmp_path) for path in store.find_records([tmp_path])]
    assert len(ways) == 60
    assert [RECORDED / way for way in ways] == list(store.find_records([RECORDED]))
    for way in ways:  # records of version 1 need steps.parquet next to them
        assert store.read_record(RECORDED / way) == store.read_record(tmp_path / way)
    assert {path.relative_to(RECORDED) for path in reading.find_rows([RECORDED]).read_records()} == {*ways}


def test_pack_whole_archives_every_file_of_one_folder_on_the_disk_or_in_an_archive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files.unpack(RECORDED, tmp_path / "runs")
    assert main(["pack", str(tmp_path / "runs"), "--whole", "--out", str(tmp_path / "out" / "kept.zip")]) == 0
    assert (tmp_path / "out" / "kept.zip").read_bytes() == RECORDED.read_bytes()
    assert main(["pack", str(RECORDED / "smoke"), "--whole", "--out", str(tmp_path / "smoke.zip")]) == 0
    assert (tmp_path / "smoke.zip").read_bytes() == files.pack(files.read_whole(tmp_path / "runs" / "smoke"))
    (tmp_path / "torn.zip").write_bytes(RECORDED.read_bytes()[:1000])
    refused = {
        "2 are given": [RECORDED, tmp_path],
        "missing: no such folder": [tmp_path / "missing"],
        "torn.zip: is not a readable archive": [tmp_path / "torn.zip"],
    }
    for message, paths in refused.items():
        assert main(["pack", *map(str, paths), "--whole", "--out", str(tmp_path / "none.zip")]) == 2
        assert message in capsys.readouterr().err and not (tmp_path / "none.zip").exists()


def test_damaged_record_in_an_archive_is_named_and_makes_pack_fail(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = packed(save(tmp_path / "runs", run(), run(repeat=1)), tmp_path / "damaged.zip")
    assert main(["pack", str(path), "--out", str(tmp_path / "out.zip")]) == 0
    with zipfile.ZipFile(path) as archive:
        damaged = next(info for info in archive.infolist() if info.filename.endswith("record.json"))
    content = bytearray(path.read_bytes())
    begin = damaged.header_offset + 30 + len(damaged.filename)  # a member's content begins after its header
    content[begin : begin + damaged.compress_size] = bytes(damaged.compress_size)
    path.write_bytes(content)
    assert main(["pack", str(path), "--out", str(tmp_path / "out.zip")]) == 1
    assert f"{path / damaged.filename}: is damaged in its archive (" in caplog.text
    assert len(files.list_members(tmp_path / "out.zip")) == 1, "the other record is packed"


def test_folder_with_archives_and_subfolders_is_read_completely(tmp_path: Path) -> None:
    folder = save(tmp_path / "one", run(), run(spec("ddp")))
    packed(save(tmp_path / "other", failed("oom", spec("zero3"))), folder / "deep" / "other.zip")
    found = results.read([folder])
    assert sorted(found.table["engine"]) == ["ddp", "zero1", "zero3"]
    assert list(store.find_records([folder])) == sorted(map(Path, found.traces["file"]))
    assert [found.record(place).spec.engine.name for place in range(3)] == list(found.table["engine"])


def test_run_in_a_folder_and_in_the_archive_next_to_it_counts_once(tmp_path: Path) -> None:
    folder = save(tmp_path / "runs", run(), run(repeat=1))
    packed(folder, tmp_path / "runs.zip")
    next(folder.rglob(store.RECORD)).unlink()
    assert list(results.read([tmp_path]).table["repeat"]) == [0, 1]
    assert len(list(store.find_records([tmp_path]))) == 2
    named = results.read([tmp_path / "runs.zip", tmp_path])
    assert list(named.table["repeat"]) == [0, 1], "an archive that is named itself is read completely"
    assert named.copies == 1


def test_packed_archive_and_its_original_records_count_once(tmp_path: Path) -> None:
    """`pack` replaces names of hosts, models and studies, so the copies differ in these columns."""
    renamed = run(spec("ddp"), environment={"hosts": ("node17",)}, study="my_paper")
    folder = save(tmp_path / "runs", renamed, run(repeat=1), failed("oom", spec("zero3")))
    assert main(["pack", str(folder), "--out", str(tmp_path / "packs" / "for_review.zip")]) == 0
    found = results.read([tmp_path])
    assert (len(found.table), found.copies) == (3, 3)


def test_archive_reports_unfinished_attempts_and_gives_access_to_single_records(tmp_path: Path) -> None:
    folder = save(tmp_path / "runs", run())
    begun = folder / "smoke" / "0123456789" / "0.0"
    begun.mkdir(parents=True)
    (begun / store.CIRCUMSTANCE).write_text("{}")
    archive = packed(folder, tmp_path / "runs.zip")
    found = results.read([archive])
    assert found.unfinished == (archive / begun.relative_to(folder),)
    assert len(results.read([found.get_file(0)]).table) == 1
    assert len(results.read([archive, archive / "smoke", found.get_file(0)]).table) == 1, "each once"


def test_unchanged_archive_is_not_opened_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = packed(save(tmp_path / "runs", run()), tmp_path / "archives" / "runs.zip")
    for path in (archive, archive.parent, archive / "smoke"):
        first = results.read([path]).table
        with monkeypatch.context() as patch:
            patch.setattr(consolidated, "walk", lambda root: pytest.fail("looked into again"))
            assert results.read([path]).table.equals(first)
    packed(save(tmp_path / "runs", run(spec("ddp"))), archive)
    for path in (archive, archive.parent, archive / "smoke"):
        assert list(results.read([path]).table["engine"]) == ["ddp", "zero1"]


def flipped(content: bytes) -> bytes:
    """Return an archive with 60 corrupted bytes of compressed data. The central directory at its end stays intact."""
    return content[:200] + bytes(byte ^ 0xFF for byte in content[200:260]) + content[260:]


def named(name: str) -> Callable[[bytes], bytes]:
    def rename(content: bytes) -> bytes:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return files.pack({name: archive.read(archive.namelist()[0])})

    return rename


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: b"",
        lambda content: b"no archive",
        lambda content: content[: len(content) // 2],
        flipped,
        lambda content: content.replace(
            b"PK\x01\x02\x14\x03\x14\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01"
        ),  # encrypted
        named("../../elsewhere/record.json"),
        named("/elsewhere/record.json"),
    ],
    ids=["empty", "text", "torn", "flipped", "encrypted", "leads out", "absolute"],
)
def test_invalid_archive_is_reported_and_skipped(spoil: Callable[[bytes], bytes], tmp_path: Path) -> None:
    archive = packed(save(tmp_path / "bad", run(spec("zero3"))), tmp_path / "runs" / "bad.zip")
    content = spoil(archive.read_bytes())
    assert content != archive.read_bytes()
    archive.write_bytes(content)
    save(tmp_path / "runs", run())
    found = results.read([tmp_path / "runs"])
    assert list(found.table["engine"]) == ["zero1"]
    (skipped,) = found.skipped
    assert archive in (skipped.path, *skipped.path.parents) and "\n" not in str(skipped)
    assert results.read([archive]).table.empty
    assert not (tmp_path / "elsewhere").exists()


def test_archive_member_above_the_size_limit_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = packed(save(tmp_path / "runs", run()), tmp_path / "runs.zip")
    monkeypatch.setattr(files, "_MEMBER_LIMIT_BYTES", 2**10)
    (skipped,) = results.read([archive]).skipped
    assert "is larger than" in skipped.why


def test_missing_path_inside_an_archive_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["table", str(RECORDED / "nowhere")]) == 2
    assert "no such file or folder" in capsys.readouterr().err
