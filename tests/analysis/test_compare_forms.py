"""Tests of the output formats of a comparison of two sets of runs, A and B: text for readers, and formats for
programs."""

import csv
import functools
import io
import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from junitparser import JUnitXml
from records import failed, run, save, spec, steps

from bench.cli import main

NASTY = "<b>rank</b> | 1\x07 & `died`"


named = functools.partial(spec, model={"name": "my_tiny"})  # a name with Markdown markup


@pytest.fixture
def sides(tmp_path: Path) -> list[str]:
    """Paths of two result sets A and B with the same five configurations.

    In B, the first configuration is slower than in A, the second is equally fast, the third is out of memory, the
    fourth was measured with another protocol, and the fifth is missing.
    """
    windows = [steps((0.1 * by,) * 30) for by in (0.99, 1.0, 1.01)]
    slower = [steps((0.12 * by,) * 30) for by in (0.99, 1.0, 1.01)]
    same = [run(named("ddp"), repeat=n, steps=window) for n, window in enumerate(windows)]
    ours = [run(named("zero1"), repeat=n, steps=window) for n, window in enumerate(windows)]
    theirs = [run(named("zero1"), repeat=n, steps=window) for n, window in enumerate(slower)]
    a = [*same, *ours, run(named("zero2")), run(named("zero3")), run(named("zero0"))]
    b = [*same, *theirs, failed("oom", named("zero2"), reason=NASTY), run(named("zero3", measure={"min_steps": 12}))]
    return [str(save(tmp_path / "a", *a)), str(save(tmp_path / "b", *b))]


def run_compare(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["compare", *words])
    return code, capsys.readouterr().out


OUTCOME = (
    "FAIL: the gate (3 %) is broken by 2 of 5 configurations: my_tiny · 2 ranks · zero1 · micro 2; "
    "my_tiny · 2 ranks · zero2 · micro 2. Excluded configurations: 1 out of memory, 1 only in A or only in B. "
    "5 configurations. Slower: 1; equal within 3 %: 1; not comparable: 1; only in A: 1; failed in B: 1. "
    "Add --across measure.min_steps to compare configurations that are not comparable."
)


def test_text_ends_with_the_outcome_and_exit_code_is_1_on_failure(
    sides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, text = run_compare(capsys, *sides, "--gate", "3%")
    assert code == 1
    assert text.splitlines()[-1] == OUTCOME
    assert "Equal in all configurations: my_tiny · 2 ranks · micro 2." in text.splitlines()
    [row] = [line for line in text.splitlines() if line.startswith("zero1")]
    assert "slower: breaks the gate" in row and "+20.0 %" in row
    assert max(map(len, text.splitlines()[2:-2])) <= 100, "the table fits 100 columns"


def test_wide_table_has_all_columns_in_one_line_per_pair(sides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, text = run_compare(capsys, *sides, "--gate", "3%", "--wide")
    [row] = [line for line in text.splitlines() if line.startswith("my_tiny · 2 ranks · zero1")]
    assert "slower: breaks the gate" in row and "+20.0 %" in row and "3 + 3 runs" in row


def test_difference_of_single_runs_is_indicative_without_an_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = (run(steps=steps((seconds,) * 30)) for seconds in (0.1, 0.15))
    _, text = run_compare(capsys, str(save(tmp_path / "a", ours)), str(save(tmp_path / "b", theirs)))
    assert "+50 %, indicative" in text and "With fewer than 3 runs of A or B, a change is only indicative" in text
    assert "95 %" not in text


def test_exit_code_is_3_without_a_gate_if_nothing_can_be_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, theirs = save(tmp_path / "a", run()), save(tmp_path / "b", run(torch="2.14.0"))
    code, text = run_compare(capsys, str(ours), str(theirs))
    assert code == 3
    assert "Not comparable: 1. Add --across versions.torch" in text
    assert run_compare(capsys, str(ours), str(theirs), "--across", "versions.torch")[0] == 0
    assert run_compare(capsys, str(ours), str(save(tmp_path / "c", failed("oom"))))[0] == 0, "failed in B is a result"
    assert run_compare(capsys, str(ours), str(theirs), "--gate", "3%")[0] == 1, "the gate has its own rule"


def test_exit_code_is_0_without_a_gate(sides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, text = run_compare(capsys, *sides)
    assert code == 0
    assert text.splitlines()[-1].startswith("5 configurations. Slower: 1;")


def test_markdown_shows_outcome_and_changed_pairs_and_folds_the_rest(
    sides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, text = run_compare(capsys, *sides, "--gate", "3%", "--format", "md")
    shown, *folded = text.split("<details>")
    assert shown.startswith(f"**{OUTCOME.replace('_', chr(92) + '_')}**\n")
    assert [row.split(" | ")[1] for row in shown.splitlines() if row.startswith("| my")] == [
        "slower: breaks the gate",
        "failed in B: breaks the gate",
    ]
    assert [part.partition("</summary>")[0] for part in folded] == [
        "<summary>1 equal within 3 %",
        "<summary>1 not comparable",
        "<summary>1 only in A",
    ]
    assert r"\<b\>rank\</b\> \| 1" in shown, "text from a record stays text"


def test_junit_output_is_readable_by_junitparser_and_an_xml_parser(
    sides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    _, text = run_compare(capsys, *sides, "--gate", "3%", "--format", "junit")
    [suite] = JUnitXml.fromstring(text.encode())
    assert (suite.tests, suite.failures, suite.skipped, suite.errors) == (5, 2, 2, 0)
    cases = ElementTree.fromstring(text).iter("testcase")
    failures = {
        case.get("name"): case.find("failure").get("message") for case in cases if case.find("failure") is not None
    }
    assert list(failures) == ["my_tiny · 2 ranks · zero1 · micro 2", "my_tiny · 2 ranks · zero2 · micro 2"]
    assert "oom: <b>rank</b> | 1 & `died`" in str(failures["my_tiny · 2 ranks · zero2 · micro 2"])


def test_junit_output_fails_without_comparable_pairs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sides = [str(save(tmp_path / engine, run(spec(engine)))) for engine in ("zero1", "zero2")]
    code, text = run_compare(capsys, *sides, "--gate", "3%", "--format", "junit")
    [suite] = JUnitXml.fromstring(text.encode())
    assert (code, suite.failures) == (1, 1)


def test_unknown_comparison_is_inconclusive_in_every_format_and_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With one run per side there is no verdict, even though the two runs are equal."""
    sides = [str(save(tmp_path / side, run())) for side in "ab"]
    for form in ("text", "md", "json", "junit"):
        code, text = run_compare(capsys, *sides, "--gate", "3%", "--format", form)
        assert code == 3
        assert "INCONCLUSIVE" in text
        assert "at least 2 more repeats of A and of B are needed" in text
    [suite] = JUnitXml.fromstring(text.encode())
    assert (suite.failures, suite.skipped) == (0, 1)
    assert run_compare(capsys, *sides, "--gate", "3%", "--strict")[0] == 1


def test_json_and_csv_have_equal_exact_numbers(sides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    _, text = run_compare(capsys, *sides, "--gate", "3%", "--format", "json")
    plain = json.loads(text)
    assert plain["broken"] and plain["verdict"] == "FAIL" and plain["gate"]["limit"] == 0.03
    _, text = run_compare(capsys, *sides, "--gate", "3%", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(text)))
    for row, line in zip(rows, plain["lines"], strict=True):
        assert row["status"] == line["status"]
        assert (float(row["ratio"]) if row["ratio"] else None) == line["ratio"]
    assert [line["ratio"] for line in plain["lines"] if line["status"] == "slower"] == [pytest.approx(1.2)]


def test_out_option_writes_the_file_and_prints_the_outcome(
    sides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "comment.md"
    code, text = run_compare(capsys, *sides, "--gate", "3%", "--format", "md", "--out", str(file))
    assert (code, text) == (1, f"{OUTCOME}\n{file}\n")
    assert file.read_text().startswith("**FAIL: the gate")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--gate", "3"], "--gate 3: must be a percentage; write 3%"),
        (["--gate=-3%"], "--gate -3%: must be a percentage; write it like 3%"),
        (["--across", "engin"], "--across engin: no such field; did you mean engine?"),
        (["--out", "nowhere/file"], "--out nowhere/file: cannot be written (No such file or directory)"),
    ],
)
def test_impossible_requests_are_refused_in_one_line(
    sides: list[str], words: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *sides, *words]) == 2
    assert error in capsys.readouterr().err


def test_side_without_records_is_an_error(sides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    assert main(["compare", sides[0], str(tmp_path / "empty")]) == 2
    assert "empty: contains no record" in capsys.readouterr().err
