import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from records import failed, plain, run, save, spec, steps

import analysis
from analysis import reading, results
from analysis.answer import describe_answer
from bench.core.errors import UserError

WITHOUT = """
import sys

class Absent:
    def find_spec(name, path=None, target=None):
        if name in ("torch", "deepspeed", "transformers", "datasets", "hydra", "omegaconf"):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent)
from bench.cli import main
sys.exit(main(sys.argv[1:]))
"""
RECORDED = Path(__file__).parents[1] / "data" / "runs.zip"


def foreign(folder: Path) -> Path:
    """Write invalid files named record.json into `folder`, and return `folder`.

    The contents of the files are a truncated record, a file of another program, a record of a future version, an
    incomplete record, binary data, and a JSON list. There is also a folder named record.json.
    """
    newer = plain(run()) | {"schema_version": 99, "new": 1}
    incomplete = {key: value for key, value in plain(run()).items() if key != "outcome"}
    contents = {
        "torn": json.dumps(plain(run()))[:300].encode(),
        "else": b'{"artist": "Ella"}',
        "newer": json.dumps(newer).encode(),
        "lacking": json.dumps(incomplete).encode(),
        "binary": b"\xff\xfe\x00",
        "list": b"[1, 2]",
    }
    for name, content in contents.items():
        (folder / name).mkdir()
        (folder / name / "record.json").write_bytes(content)
    (folder / "folder" / "record.json").mkdir(parents=True)
    return folder


def test_valid_records_are_read_and_other_files_are_listed_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, run(), run(spec("ddp")))
    found = results.read([foreign(tmp_path)])
    assert len(found.table) == 2
    why = {skipped.path.parent.name: skipped.why for skipped in found.skipped}
    assert set(why) == {"torn", "else", "newer", "lacking", "binary", "list", "folder"}
    assert "newer than 3" in why["newer"]
    assert why["lacking"].startswith("outcome:")
    assert why["torn"] == "not complete JSON, it ends after 300 bytes; restore it from a copy"
    assert describe_answer(found)[-1] == "7 of 9 files were skipped, because they are no readable records."
    results.warn(found)
    assert "7 of 9 files" in caplog.messages[0]
    assert all(str(one.path) in line for one, line in zip(found.skipped, caplog.messages[1:4], strict=False))
    assert caplog.messages[4:] == ["  … and 4 more"]


def test_file_below_two_of_the_paths_counts_once(tmp_path: Path) -> None:
    save(tmp_path, run())
    assert len(analysis.load([tmp_path, tmp_path / "smoke", *tmp_path.rglob("record.json")])) == 1
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / "record.json").symlink_to(next(tmp_path.rglob("record.json")))
    assert len(analysis.load(tmp_path)) == 1


def test_copies_of_a_record_count_once_and_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    later = {"started_at": "2026-11-25T09:00:00+00:00"}
    runs = run(), run(repeat=1), run(spec("ddp"), environment={"hosts": ["a"]})
    save(tmp_path / "a", *runs, failed("oom", spec("zero3")), failed("oom", spec("zero2"), started_at=""))
    save(tmp_path / "a_copy", *runs, failed("oom", spec("zero3")), failed("oom", spec("zero2"), started_at=""))
    save(tmp_path / "b", run(**later), run(repeat=1, steps=steps((0.2,) * 30)), failed("oom", spec("zero3"), **later))
    found = results.read([tmp_path / "a", tmp_path])
    alone = results.read([tmp_path / "a"])
    assert found.copies == 4
    assert len(found.table) == len(alone.table) + 3 + 1, "a run without a start and without times is never a copy"
    results.warn(found)
    assert caplog.messages == ["left out, because they are copies of other records: 4"]
    assert "4 copies left out" in found.describe()


def test_attempt_without_a_record_is_listed_as_unfinished(tmp_path: Path) -> None:
    begun = tmp_path / "smoke" / "0123456789" / "0.0"
    begun.mkdir(parents=True)
    (begun / "circumstance.json").write_text("{}")
    assert results.read([tmp_path]).unfinished == (begun,)


def test_runs_are_ordered_by_ranks_engine_and_numeric_micro_batch(tmp_path: Path) -> None:
    expected = [(1, "ddp", 2), (1, "zero1", 2), (1, "zero1", 16), (2, "ddp", 2)]
    save(tmp_path, *(run(spec(engine, micro, ranks)) for ranks, engine, micro in reversed(expected)))
    table = analysis.load(tmp_path)
    assert list(zip(table["world_size"], table["engine"], table["micro"], strict=True)) == expected
    whole = reading.find_rows([tmp_path]).read_records().values()
    assert [(r.spec.world_size, r.spec.engine.name, r.spec.batch.micro) for r in whole] == expected


def test_missing_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        analysis.load(tmp_path / "nowhere")


def test_load_accepts_one_path_or_several(tmp_path: Path) -> None:
    save(tmp_path, run())
    for paths in (tmp_path, str(tmp_path), [str(tmp_path)], [tmp_path, tmp_path]):
        assert len(analysis.load(paths)) == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("statement", "excluded"),
    [
        ("import analysis", {"pandas", "pydantic", "numpy", "matplotlib", "torch"}),
        ("import analysis.cli.table, analysis.cli.report", {"pandas", "numpy", "matplotlib", "jinja2", "torch"}),
        (
            "import analysis.report, analysis.formats",
            {"torch", "deepspeed", "transformers", "hydra", "matplotlib.pyplot"},
        ),
    ],
)
def test_imports_load_no_heavy_libraries(statement: str, excluded: set[str]) -> None:
    completed = subprocess.run(
        [sys.executable, "-c", f"{statement}; import sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert not excluded & set(completed.stdout.split())


@pytest.mark.processes
@pytest.mark.parametrize("verb", ["table", "report"])
def test_reading_works_without_the_libraries_needed_for_runs(verb: str, tmp_path: Path) -> None:
    """The command runs in a process in which torch cannot be imported, as after an installation without extras."""
    out = ["--out", str(tmp_path)] if verb == "report" else []
    completed = subprocess.run(
        [sys.executable, "-c", WITHOUT, verb, str(RECORDED / "smoke"), *out],
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    assert (tmp_path / "report.html").is_file() if verb == "report" else "zero3" in completed.stdout


def test_unreadable_folder_is_listed_as_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, run())
    (tmp_path / "closed").mkdir()
    look = os.scandir

    def refused(path: str) -> Iterator[os.DirEntry[str]]:
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied")
        return look(path)

    monkeypatch.setattr(os, "scandir", refused)  # permissions do not stop root, who may run this test
    (skipped,) = results.read([tmp_path]).skipped
    assert (skipped.path, skipped.why) == (tmp_path / "closed", "Permission denied")


def test_table_of_recorded_runs_has_rates_for_measured_runs_only() -> None:
    table = analysis.load(RECORDED)
    assert (table.outcome == "ok").any()
    measured = (table.outcome == "ok") & (table.evidence == "measured")
    assert table.loc[measured, "tokens_per_s"].notna().all()
    assert table.loc[~measured, "tokens_per_s"].isna().all()
