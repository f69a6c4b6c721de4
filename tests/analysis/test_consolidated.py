"""Reading a folder with its cache gives the same results as a fresh read, whatever changed in between."""

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pytest
from records import failed, plain, run, save, spec, steps

from analysis import results
from analysis.reading import consolidated, extraction, walk
from analysis.results import Results
from bench.core import plugins, store

kept_file = consolidated._build_cache_path


@pytest.fixture(autouse=True)
def _small_folders_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Cache folders of any size, as if their last change were ten seconds old, in a cache of the test's own."""
    clock = time.time_ns
    monkeypatch.setattr(consolidated, "LEAST", 1)
    monkeypatch.setattr(walk, "time_ns", lambda: clock() + 10**10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List of the record files read so far. It grows while the test runs."""
    paths: list[str] = []
    read = consolidated.extract

    def watched(
        root: Path, files: list[extraction.RecordFile], *followed: extraction.Follow
    ) -> extraction.ExtractedRows:
        paths.extend(file.path for file in files)
        return read(root, files, *followed)

    monkeypatch.setattr(consolidated, "extract", watched)
    return paths


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A results folder with six runs, a foreign record file, and an attempt without a record.

    One of the runs has a wrong loss, and one failed before its environment was known.
    """
    wrong = run(spec("zero2"), steps=steps(loss=(99.0,) * 35))
    good = run(spec("ddp")), run(), run(repeat=1), wrong, failed("oom", spec("zero3"), torch=None)
    folder = save(tmp_path / "runs", *good, run(spec(micro=4), study="other"))
    (folder / "foreign").mkdir()
    (folder / "foreign" / "record.json").write_text("{}")
    (folder / "smoke" / "0123456789" / "0.0").mkdir(parents=True)
    (folder / "smoke" / "0123456789" / "0.0" / "circumstance.json").write_text("{}")
    return folder


def anew(folder: Path) -> Results:
    """Return the results of reading a folder without its cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(consolidated, "LEAST", 10**9)
        patch.setattr(consolidated, "_load", lambda root: None)
        return results.read([folder])


def assert_same(one: Results, other: Results) -> None:
    pd.testing.assert_frame_equal(one.table, other.table, check_exact=True)
    pd.testing.assert_frame_equal(one.traces, other.traces, check_exact=True)
    pd.testing.assert_frame_equal(one.summary, other.summary, check_exact=True)
    assert [str(skipped) for skipped in one.skipped] == [str(skipped) for skipped in other.skipped]
    assert one.unfinished == other.unfinished
    places = range(len(one.table))
    assert [one.record(place) for place in places] == [other.record(place) for place in places]


def test_a_later_read_finds_the_same_and_opens_no_record(runs: Path, opened: list[str]) -> None:
    first = results.read([runs])
    assert len(opened) == 7
    assert set(first.table["outcome"]) == {"ok", "invalid", "oom"}
    opened.clear()
    kept = results.read([runs])
    assert opened == ["foreign/record.json"], "it may be readable by now"
    assert_same(kept, first)
    assert len(kept.skipped) == len(kept.unfinished) == 1


def test_an_invalid_run_whose_record_is_gone_by_then_shows_no_speed(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (wrong,) = (row for _, row in results.read([runs]).table.iterrows() if row["outcome"] == "invalid")

    def gone(path: Path) -> None:
        raise FileNotFoundError(path)

    monkeypatch.setattr(results, "read_record", gone)
    (row,) = (row for _, row in results.read([runs]).table.iterrows() if row["outcome"] == "invalid")
    assert row["config_id"] == wrong["config_id"]
    assert row[["sample_s", "step_s", "tokens_per_s", "mfu"]].isna().all()
    assert wrong[["sample_s", "step_s", "tokens_per_s", "mfu"]].isna().all() and wrong["peak_allocated_bytes"] > 0


def first_record(folder: Path) -> Path:
    return min(folder.rglob("*.0/record.json"))


def add(folder: Path) -> None:
    save(folder, run(repeat=len(list(folder.rglob("*.0")))))


def remove(folder: Path) -> None:
    first_record(folder).unlink()


def move_away(folder: Path) -> None:
    shutil.rmtree(first_record(folder).parents[1])


def change_in_disguise(folder: Path) -> None:
    """Change the content of a file, but keep its name, size and modification time."""
    path = first_record(folder)
    before, content = path.stat(), path.read_bytes()
    path.write_bytes(content.replace(b'"seed": 0', b'"seed": 7'))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def finish(folder: Path) -> None:
    attempt = next((path.parent for path in folder.rglob("circumstance.json")), folder / "smoke" / "0123456789" / "0.0")
    attempt.mkdir(parents=True, exist_ok=True)
    store.write_json(attempt / "record.json", run(spec(micro=16)))


def tear(folder: Path) -> None:
    first_record(folder).write_text("{")


def mend(folder: Path) -> None:
    (folder / "foreign" / "record.json").write_bytes(store.to_json(run(spec(micro=8))))


def nest(folder: Path) -> None:
    """Create another results folder inside an attempt's folder."""
    attempt = first_record(folder).parent
    save(attempt / f"copy{len(list(attempt.iterdir()))}", run(spec(micro=32)))


def rename(folder: Path) -> None:
    study = max(path for path in folder.iterdir() if path.is_dir())
    study.rename(f"{study}er")


EDITS = (add, remove, move_away, change_in_disguise, finish, tear, mend, nest, rename)


@pytest.mark.parametrize("edit", EDITS)
def test_whatever_changes_is_seen(edit: Callable[[Path], None], runs: Path) -> None:
    before = results.read([runs])
    edit(runs)
    after = results.read([runs])
    assert_same(after, anew(runs))
    told = [(list(found.traces["file"]), found.table.to_csv()) for found in (before, after)]
    assert told[0] != told[1]


@pytest.mark.parametrize("seed", range(5))
def test_after_any_sequence_of_changes_it_is_as_read_anew(seed: int, runs: Path) -> None:
    save(runs, *(run(repeat=repeat) for repeat in range(100, 110)))
    rng = random.Random(seed)
    for _ in range(8):
        rng.choice(EDITS)(runs)
        assert_same(results.read([runs]), anew(runs))


def test_only_what_changed_is_read_again(runs: Path, opened: list[str]) -> None:
    results.read([runs])
    opened.clear()
    add(runs)
    tear(runs)
    results.read([runs])
    assert len(opened) == 2 + 1, "the new one, the torn one, and the foreign one"


def test_what_has_only_just_changed_is_not_trusted(
    runs: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two changes within one tick of the file system's clock get the same modification time. Recently changed files
    are therefore read again."""
    monkeypatch.setattr(walk, "time_ns", lambda: first_record(runs).stat().st_ctime_ns)
    results.read([runs])
    opened.clear()
    results.read([runs])
    assert len(opened) == 7


@pytest.mark.parametrize(
    "spoil",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: b"not Parquet at all",
        lambda content: content[:-100] + bytes(100),
        *(lambda content, at=at: _flipped(content, at) for at in (0.1, 0.23, 0.25, 0.27, 0.3, 0.36, 0.5, 0.7, 0.9)),
    ],
)
def test_a_spoilt_file_is_made_again(spoil: Callable[[bytes], bytes], runs: Path) -> None:
    first = results.read([runs])
    path = kept_file(runs)
    path.write_bytes(spoil(path.read_bytes()))
    assert_same(results.read([runs]), first)
    assert_same(results.read([runs]), first)


def _flipped(content: bytes, at: float) -> bytes:
    place = int(at * len(content))
    return content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :]


def test_somebody_elses_parquet_is_no_consolidated_file(runs: Path) -> None:
    first = results.read([runs])
    pd.DataFrame({"file": ["a"]}).to_parquet(kept_file(runs))
    assert_same(results.read([runs]), first)


def test_other_formulas_read_every_record_again(runs: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    results.read([runs])
    opened.clear()
    monkeypatch.setattr(consolidated, "_formulas", lambda: "of a newer version")
    results.read([runs])
    assert len(opened) == 7


def test_another_version_of_an_installed_metric_reads_every_record_again(
    runs: Path, tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    metric = tmp_path / "their_metric.py"
    metric.write_text("FACTOR = 1")
    monkeypatch.setattr(plugins, "list_installed_files", lambda kind: [metric] if kind is plugins.METRIC else [])
    results.read([runs])
    opened.clear()
    results.read([runs])
    assert len(opened) == 1  # the file that is no record
    metric.write_text("FACTOR = 2")
    results.read([runs])
    assert len(opened) == 8


def test_nothing_is_written_into_the_folder_that_is_read(runs: Path, tmp_path: Path, opened: list[str]) -> None:
    def look() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_ctime_ns, path.stat().st_size) for path in (runs, *runs.rglob("*"))}

    before = look()
    first = results.read([runs])
    opened.clear()
    assert_same(results.read([runs]), first)
    assert opened == ["foreign/record.json"]
    assert look() == before
    assert len(list((tmp_path / "cache").rglob("*.parquet"))) == 1


def test_where_nothing_can_be_written_it_is_read_all_the_same(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(consolidated, "write_atomically", refused)
    assert_same(results.read([runs]), anew(runs))


def test_a_folder_of_few_records_gets_no_file(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consolidated, "LEAST", 8)
    results.read([runs])
    assert not (kept_file(runs)).exists()


def test_folders_with_a_file_each_are_judged_together(tmp_path: Path, opened: list[str]) -> None:
    one, other = save(tmp_path / "one", run()), save(tmp_path / "other", run(spec("ddp")))
    assert "unverified" in results.read([one]).table["flags"][0].split()
    results.read([other])
    opened.clear()
    together = results.read([one, other])
    assert not opened
    assert list(together.table["engine"]) == ["ddp", "zero1"]
    assert "unverified" not in together.table["flags"][1].split()


def test_another_folder_at_the_same_path_is_another(runs: Path) -> None:
    results.read([runs])
    runs.rename(runs.with_name("moved"))
    save(runs, run(spec(micro=64)))
    assert list(results.read([runs]).table["micro"]) == [64]
    assert_same(results.read([runs.with_name("moved")]), anew(runs.with_name("moved")))


def test_several_may_read_at_once(runs: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: results.read([runs]), range(8)))
    for one in found:
        assert_same(one, found[0])
    assert list(kept_file(runs).parent.iterdir()) == [kept_file(runs)]


def test_who_follows_hears_how_many_of_the_new_files_are_read(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "_BATCH", 3)
    heard: list[tuple[int, int]] = []
    results.read([runs], lambda read, files: heard.append((read, files)))
    assert heard == [(3, 7), (6, 7), (7, 7)]
    heard.clear()
    results.read([runs], lambda read, files: heard.append((read, files)))
    assert not heard, "nothing is new"


@pytest.mark.processes
def test_processes_find_what_one_does(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = anew(runs)
    monkeypatch.setattr(extraction, "_SHARE", 1)
    monkeypatch.setattr(extraction, "_BATCH", 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert_same(anew(runs), alone)
    monkeypatch.setattr(extraction.sys, "executable", shutil.which("false"))
    assert_same(anew(runs), alone)


def test_numbers_that_no_column_can_hold_are_named(tmp_path: Path) -> None:
    save(tmp_path / "runs", *(run(spec(micro=micro)) for micro in (1, 2, 4)))
    path = first_record(tmp_path / "runs")
    large = plain(store.read_record(path))
    large["observations"]["memory"][0]["peak_reserved_bytes"] = 10**30
    large["observations"]["memory"][1]["peak_reserved_bytes"] = 10**30
    path.write_text(json.dumps(large))
    found = results.read([tmp_path / "runs"])
    assert len(found.table) == 2
    assert [skipped.path for skipped in found.skipped] == [path]
