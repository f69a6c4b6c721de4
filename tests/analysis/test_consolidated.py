"""Tests of the cache that is written when a results folder is read. A later read with the cache must give the same
results as a read without it, whatever changed in the folder in between."""

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
from records import failed, plain, run, save, spec, steps

from analysis import results
from analysis.reading import consolidated, extraction, walk
from analysis.results import Results
from bench.core import installed_plugins, store

cache_path = consolidated._build_cache_path


@pytest.fixture(autouse=True)
def _cache_small_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Use a cache for folders of any size, in a folder of the test's own. Files count as last changed ten seconds ago,
    because very recent changes are not cached."""
    clock = time.time_ns
    monkeypatch.setattr(consolidated, "LEAST", 1)
    monkeypatch.setattr(walk, "time_ns", lambda: clock() + 10**10)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List to which the path of every record file is appended when the file is read."""
    paths: list[str] = []
    read = consolidated.extract

    def watched(
        root: Path, files: list[extraction.RecordFile], *followed: extraction.Follow
    ) -> tuple[pa.Table, dict[str, str]]:
        paths.extend(file.path for file in files)
        return read(root, files, *followed)

    monkeypatch.setattr(consolidated, "extract", watched)
    return paths


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A results folder with six runs, a record file that zeroscale did not write, and an attempt without a record.

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


def read_without_cache(folder: Path) -> Results:
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


def test_second_read_gives_equal_results_without_opening_valid_records(runs: Path, opened: list[str]) -> None:
    first = results.read([runs])
    assert len(opened) == 7
    assert set(first.table["outcome"]) == {"ok", "invalid", "oom"}
    opened.clear()
    kept = results.read([runs])
    assert opened == ["foreign/record.json"], "a file that could not be read may be readable by now"
    assert_same(kept, first)
    assert len(kept.skipped) == len(kept.unfinished) == 1


def test_invalid_run_has_no_speed_after_its_record_was_removed(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def repair_foreign(folder: Path) -> None:
    (folder / "foreign" / "record.json").write_bytes(store.to_json(run(spec(micro=8))))


def nest(folder: Path) -> None:
    """Save another results folder inside the folder of an attempt."""
    attempt = first_record(folder).parent
    save(attempt / f"copy{len(list(attempt.iterdir()))}", run(spec(micro=32)))


def rename(folder: Path) -> None:
    study = max(path for path in folder.iterdir() if path.is_dir())
    study.rename(f"{study}er")


EDITS = (add, remove, move_away, change_in_disguise, finish, tear, repair_foreign, nest, rename)


@pytest.mark.parametrize("edit", EDITS)
def test_each_kind_of_change_is_detected(edit: Callable[[Path], None], runs: Path) -> None:
    before = results.read([runs])
    edit(runs)
    after = results.read([runs])
    assert_same(after, read_without_cache(runs))
    read_rows = [(list(found.traces["file"]), found.table.to_csv()) for found in (before, after)]
    assert read_rows[0] != read_rows[1]


@pytest.mark.parametrize("seed", range(5))
def test_read_after_random_changes_equals_a_read_without_cache(seed: int, runs: Path) -> None:
    save(runs, *(run(repeat=repeat) for repeat in range(100, 110)))
    rng = random.Random(seed)
    for _ in range(8):
        rng.choice(EDITS)(runs)
        assert_same(results.read([runs]), read_without_cache(runs))


def test_only_changed_records_are_read_again(runs: Path, opened: list[str]) -> None:
    results.read([runs])
    opened.clear()
    add(runs)
    tear(runs)
    results.read([runs])
    assert len(opened) == 2 + 1, "the new file, the truncated file and the foreign file"


def test_recently_changed_records_are_read_again(
    runs: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two changes within one tick of the file system's clock have the same modification time. Therefore a recently
    changed file may have changed again without a new modification time. Such a file is read again."""
    monkeypatch.setattr(walk, "time_ns", lambda: first_record(runs).stat().st_ctime_ns)
    results.read([runs])
    opened.clear()
    results.read([runs])
    assert len(opened) == 7


@pytest.mark.parametrize(
    "corrupt",
    [
        lambda content: b"",
        lambda content: content[: len(content) // 2],
        lambda content: b"not Parquet at all",
        lambda content: content[:-100] + bytes(100),
        *(lambda content, at=at: _flipped(content, at) for at in (0.1, 0.23, 0.25, 0.27, 0.3, 0.36, 0.5, 0.7, 0.9)),
    ],
)
def test_corrupted_cache_is_rebuilt(corrupt: Callable[[bytes], bytes], runs: Path) -> None:
    first = results.read([runs])
    path = cache_path(runs)
    path.write_bytes(corrupt(path.read_bytes()))
    assert_same(results.read([runs]), first)
    assert_same(results.read([runs]), first)


def _flipped(content: bytes, at: float) -> bytes:
    place = int(at * len(content))
    return content[:place] + bytes([content[place] ^ 0xFF]) + content[place + 1 :]


def test_parquet_file_of_another_format_is_not_used_as_a_cache(runs: Path) -> None:
    first = results.read([runs])
    pd.DataFrame({"file": ["a"]}).to_parquet(cache_path(runs))
    assert_same(results.read([runs]), first)


def test_changed_formulas_invalidate_the_cache(runs: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    results.read([runs])
    opened.clear()
    monkeypatch.setattr(consolidated, "_formulas", lambda: "of a newer version")
    results.read([runs])
    assert len(opened) == 7


def test_changed_installed_metric_invalidates_the_cache(
    runs: Path, tmp_path: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    metric = tmp_path / "their_metric.py"
    metric.write_text("FACTOR = 1")
    monkeypatch.setattr(installed_plugins, "list_installed_files", lambda kind: [metric] if kind == "metric" else [])
    results.read([runs])
    opened.clear()
    results.read([runs])
    assert len(opened) == 1  # the file that is no record
    metric.write_text("FACTOR = 2")
    results.read([runs])
    assert len(opened) == 8


def test_reading_writes_nothing_into_the_results_folder(runs: Path, tmp_path: Path, opened: list[str]) -> None:
    def look() -> dict[Path, tuple[int, int]]:
        return {path: (path.stat().st_ctime_ns, path.stat().st_size) for path in (runs, *runs.rglob("*"))}

    before = look()
    first = results.read([runs])
    opened.clear()
    assert_same(results.read([runs]), first)
    assert opened == ["foreign/record.json"]
    assert look() == before
    assert len(list((tmp_path / "cache").rglob("*.parquet"))) == 1


def test_reading_works_without_a_writable_cache(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(consolidated, "write_atomically", refused)
    assert_same(results.read([runs]), read_without_cache(runs))


def test_folder_with_few_records_is_not_cached(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consolidated, "LEAST", 8)
    results.read([runs])
    assert not (cache_path(runs)).exists()


def test_cached_folders_are_judged_together(tmp_path: Path, opened: list[str]) -> None:
    one, other = save(tmp_path / "one", run()), save(tmp_path / "other", run(spec("ddp")))
    assert "unverified" in results.read([one]).table["flags"][0].split()
    results.read([other])
    opened.clear()
    together = results.read([one, other])
    assert not opened
    assert list(together.table["engine"]) == ["ddp", "zero1"]
    assert "unverified" not in together.table["flags"][1].split()


def test_new_folder_at_the_path_of_a_moved_folder_is_read_again(runs: Path) -> None:
    results.read([runs])
    runs.rename(runs.with_name("moved"))
    save(runs, run(spec(micro=64)))
    assert list(results.read([runs]).table["micro"]) == [64]
    assert_same(results.read([runs.with_name("moved")]), read_without_cache(runs.with_name("moved")))


def test_concurrent_reads_give_equal_results_and_one_cache_file(runs: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: results.read([runs]), range(8)))
    for one in found:
        assert_same(one, found[0])
    assert list(cache_path(runs).parent.iterdir()) == [cache_path(runs)]


def test_progress_callback_gets_the_number_of_new_files_read(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extraction, "_BATCH", 3)
    progress: list[tuple[int, int]] = []
    results.read([runs], lambda read, files: progress.append((read, files)))
    assert progress == [(3, 7), (6, 7), (7, 7)]
    progress.clear()
    results.read([runs], lambda read, files: progress.append((read, files)))
    assert not progress, "nothing is new"


@pytest.mark.processes
def test_reading_in_several_processes_and_its_fallback_give_equal_results(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = read_without_cache(runs)
    monkeypatch.setattr(extraction, "_SHARE", 1)
    monkeypatch.setattr(extraction, "_BATCH", 2)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    assert_same(read_without_cache(runs), alone)
    monkeypatch.setattr(extraction.sys, "executable", shutil.which("false"))
    assert_same(read_without_cache(runs), alone)


def test_record_with_a_number_too_large_for_its_column_is_reported(tmp_path: Path) -> None:
    save(tmp_path / "runs", *(run(spec(micro=micro)) for micro in (1, 2, 4)))
    path = first_record(tmp_path / "runs")
    large = plain(store.read_record(path))
    large["observations"]["memory"][0]["peak_reserved_bytes"] = 10**30
    large["observations"]["memory"][1]["peak_reserved_bytes"] = 10**30
    path.write_text(json.dumps(large))
    found = results.read([tmp_path / "runs"])
    assert len(found.table) == 2
    assert [skipped.path for skipped in found.skipped] == [path]
