"""Tests of the history of step times by commit, by software versions or by day: detected changes, the order of values,
and the output."""

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from records import failed, run, save, scattered, spec, steps

from analysis import results
from analysis.history import History, Origin, build_axis, build_history
from analysis.history.output import render_page, to_text
from bench.cli import main
from bench.core.record import RunRecord
from bench.core.spec import config_id

COMMITS = [f"{number:02d}" + "ab" * 19 for number in range(12)]


def measured(
    number: int, seconds: float, repeat: int = 0, engine: str = "zero2", commit: str = "", torch: str = "2.13.0"
) -> RunRecord:
    """Return a run of the commit with this number. Each commit ran on a different day. `commit` is a hash
    that is used instead of the hash for this number."""
    environment = {"git": {"commit": commit or COMMITS[number], "dirty": False}}
    study = f"night{number}"
    of = run(
        spec(engine), study=study, repeat=repeat, torch=torch, environment=environment, steps=steps((seconds,) * 30)
    )
    around = of.circumstance.model_copy(update={"started_at": f"2026-10-{number + 1:02d}T10:{repeat:02d}:00Z"})
    return of.model_copy(update={"circumstance": around})


@pytest.fixture
def slowed_runs(tmp_path: Path) -> Path:
    """A results folder with twelve commits and three runs of each engine per commit. From the seventh commit on, torch
    is newer and zero2 is 10 % slower. zero3 does not change."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(12):
        torch = "2.9.1" if number < 6 else "2.10.0"
        for engine, level in (("zero2", 0.1 * (1.1 if number >= 6 else 1.0)), ("zero3", 0.2)):
            found += [
                measured(number, level * float(np.exp(0.003 * rng.standard_normal())), repeat, engine, torch=torch)
                for repeat in range(3)
            ]
    return save(tmp_path / "runs", *found)


def history(
    folder: Path, by: str = "commit", ancestry: Callable[[Sequence[str]], Sequence[str]] | None = None
) -> History:
    return build_history(results.read([folder]), by, ancestry or (lambda commits: ()))


def test_change_of_a_configuration_lists_size_interval_and_changed_versions(slowed_runs: Path) -> None:
    found = history(slowed_runs)
    changed, steady = found.series
    ((change, also),) = changed.changes
    assert (changed.name, steady.changes) == ("tiny · 2 ranks · zero2, micro 2 · fp32", ())
    assert [found.axis.places[place].key for place in (change.before, change.after)] == COMMITS[5:7]
    assert change.size == pytest.approx(0.1, abs=0.01)
    assert change.interval.low < 0.1 < change.interval.high
    assert also == "torch 2.9.1 → 2.10.0"
    assert [len(value.sample_s) for value in changed.values] == [3] * 12
    assert changed.values[0].typical == pytest.approx(0.1 / 4, rel=0.01)


def test_commits_are_in_git_order_or_else_in_order_of_measurement(slowed_runs: Path) -> None:
    assert [place.key for place in history(slowed_runs).axis.places] == COMMITS
    turned = history(slowed_runs, ancestry=lambda commits: COMMITS[::-1]).axis
    assert [place.key for place in turned.places] == COMMITS[::-1]
    assert "git" in turned.order
    partly = history(slowed_runs, ancestry=lambda commits: COMMITS[:3]).axis
    assert [place.key for place in partly.places] == COMMITS


def test_versions_are_ordered_by_number_and_days_by_date(slowed_runs: Path) -> None:
    assert [place.name for place in history(slowed_runs, "version").axis.places] == ["torch 2.9.1", "torch 2.10.0"]
    days = history(slowed_runs, "date")
    assert (days.axis.places[0].name, len(days.axis.places)) == ("2026-10-01", 12)
    assert days.series[0].changes[0].also == "torch 2.9.1 → 2.10.0, commit 05abababab → 06abababab"


def test_uncommitted_changes_are_a_separate_position_after_their_commit() -> None:
    origins = [Origin(commit, (), "2026-10-01") for commit in ("aa+", "aa", "bb")]
    axis = build_axis(origins, "commit", lambda commits: ["aa", "bb"])
    assert [place.name for place in axis.places] == ["aa", "aa with changes", "bb"]


def test_rounds_of_two_comparisons_are_separate_runs(tmp_path: Path) -> None:
    """Every call of `zeroscale ab` writes to its own folder and numbers its rounds from 0. Two runs with equal repeat
    numbers in different folders are therefore different runs."""
    one, other = measured(0, 0.1), measured(0, 0.2)
    for folder, record in (("ab-1", one), ("ab-2", other)):
        save(tmp_path / folder, record)
    (series,) = history(tmp_path).series
    assert [len(value.sample_s) for value in series.values] == [2]


def test_excluded_runs_are_counted(slowed_runs: Path, tmp_path: Path) -> None:
    busy = run(
        spec("zero2"),
        study="x",
        steps=steps((0.5,) * 30),
        load=({"node": 0, "others_share": 0.4},),
        environment={"git": {"commit": "f"}},
    )
    # a configuration all of whose runs are excluded
    only_busy = busy.model_copy(update={"spec": spec("zero1"), "config_id": config_id(spec("zero1"))})
    unplaced = run(spec("zero2"), study="y", torch=None)
    oom = failed("oom", spec("zero2"), study="z", environment={"git": {"commit": "f"}})
    save(slowed_runs, busy, only_busy, unplaced, oom)
    found = history(slowed_runs)
    assert [(one.flagged, one.failed) for one in found.series] == [(1, 1), (0, 0)]
    assert (found.flagged, found.failed, found.nowhere) == (2, 1, 1)
    assert len(found.series[0].changes) == 1
    excluded = "2 runs made on a busy machine or paused, 1 run without step times, 1 run with an unknown commit."
    assert excluded in to_text(found)


def test_page_and_terminal_show_the_same_changes(
    slowed_runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["history", str(slowed_runs), "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr().out
    page = (tmp_path / "out" / "history.html").read_text()
    for text in (
        "slower, +",
        "05abababab → 06abababab",
        "torch 2.9.1 → 2.10.0",
        "No change was detected in 1 configuration",
    ):
        assert text in printed
        assert text in page
    assert page.count("<figure>") == 2
    assert "http:" not in page and "https:" not in page and "<script" not in page
    lines = (tmp_path / "out" / "changes.csv").read_text().splitlines()
    assert (len(lines), lines[0].split(",")[0]) == (2, "config_id")
    assert len((tmp_path / "out" / "values.csv").read_text().splitlines()) == 25


def test_text_from_records_is_escaped_on_the_page(tmp_path: Path) -> None:
    markup = "<img src=x onerror=alert(1)>"
    save(tmp_path, measured(0, 0.1, commit=markup))
    assert markup not in render_page(history(tmp_path))


def test_commits_are_ordered_by_the_surrounding_checkout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newer commit was measured before the older commit. The order of commits comes from the Git checkout in which
    the command runs."""
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    for name in ("old", "new"):
        subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", name], check=True)
    listed = subprocess.run([*git, "rev-list", "HEAD"], check=True, capture_output=True, text=True).stdout.split()
    save(tmp_path / "runs", *(measured(number, 0.1, commit=commit) for number, commit in enumerate(listed)))
    monkeypatch.chdir(tmp_path)
    assert main(["history", "runs", "--out", "out"]) == 0
    assert "2 commits, sorted by git ancestry" in capsys.readouterr().out
    values = (tmp_path / "out" / "values.csv").read_text().splitlines()[1:]
    assert [next(one for one in listed if one in line) for line in values] == listed[::-1]


@pytest.mark.parametrize(
    ("records", "words", "message"),
    [
        ([], [], "contains no record"),
        ([run(torch=None)], [], "no usable run; excluded: 1 run with an unknown commit; choose another --by"),
        (
            [run(load=({"node": 0, "others_share": 0.4},), environment={"git": {"commit": "f"}})],
            [],
            "excluded: 1 run made on a busy machine or paused; measure again on an idle machine",
        ),
        ([run(steps=steps(scattered(1, 2, 3)))], ["--by", "week"], "is not one of the choices; choose from commit"),
        ([measured(0, 0.1)], ["--out", "/dev/null/x"], "cannot be written"),
    ],
)
def test_invalid_input_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], records: list[RunRecord], words: list[str], message: str
) -> None:
    save(tmp_path, *records)
    assert main(["history", str(tmp_path), *words]) == 2
    error_lines = capsys.readouterr().err.strip().splitlines()
    assert message in error_lines[-1]
