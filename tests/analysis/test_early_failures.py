"""Tests with attempts (tries at a run) that failed before their environment was recorded. All parts of the analysis
that compare rows must treat such attempts in the same way."""

from pathlib import Path
from typing import Any

import pytest
from comparing import against
from records import failed, results, run, spec

from analysis.claims.findings import find_findings
from analysis.questions import assign_environments, drop_retried, group_by_question, may_be_same
from analysis.scaling.curves import list_families
from analysis.summary import Row


def row(config_id: str, environment_id: str | None, n: int = 0, evidence: str = "measured") -> Row:
    return {
        "config_id": config_id, "machine": "here", "environment_id": environment_id, "n": n, "evidence": evidence,
    }  # fmt: skip


EARLY, OTHER, KNOWN, LATE = row("a", None), row("b", None), row("a", "env1", n=1), row("a", "env2")


@pytest.mark.parametrize(
    ("rows", "left"),
    [
        ([EARLY, KNOWN], [KNOWN]),
        ([EARLY, LATE], [LATE]),  # retried, and failed with a known environment
        ([EARLY, OTHER], [EARLY, OTHER]),
        ([OTHER, KNOWN], [OTHER, KNOWN]),
        ([EARLY, {**KNOWN, "machine": "there"}], [EARLY, {**KNOWN, "machine": "there"}]),
        ([EARLY, row("a", "env1", 1, "rehearsed")], [EARLY, row("a", "env1", 1, "rehearsed")]),
        ([row("a", None, evidence="predicted"), KNOWN], [KNOWN]),
    ],
)
def test_early_failure_is_dropped_if_its_point_was_retried(rows: list[Row], left: list[Row]) -> None:
    assert drop_retried(rows) == left


@pytest.mark.parametrize(
    ("rows", "environments"),
    [
        ([OTHER, KNOWN], ["env1", "env1"]),  # rows with a known environment come first
        ([OTHER, LATE, KNOWN], ["env2", "env1", "env1"]),  # preferably the environment of a row with a number
        ([EARLY, OTHER], [None, None]),
        ([OTHER, row("c", "env3", 1), KNOWN], ["env3", "env1", "env3"]),
    ],
)
def test_early_failure_gets_the_environment_of_rows_with_an_equal_spec(
    rows: list[Row], environments: list[str | None]
) -> None:
    assert [found for _, found in assign_environments(rows, lambda row: "the same")] == environments
    alone = assign_environments(rows, lambda row: row["config_id"])
    assert all(found is None for row, found in alone if row is OTHER)


def test_unknown_environment_matches_any_and_a_known_environment_only_itself() -> None:
    assert may_be_same(None, "env1") and may_be_same("env1", None) and may_be_same(None, None)
    assert may_be_same("env1", "env1") and not may_be_same("env1", "env2")


# -- the same set, in every part of the analysis


def list_outcomes(early: Any, *others: Any, tmp_path: Path) -> dict[str, list[str]]:
    """Return the outcomes of the runs that each part of the analysis uses. The keys are the names of these parts. The
    run `early` failed before its environment was recorded. `others` are runs of the same engine."""
    records = [early, *others]
    of_set = results(*records)
    return {
        "questions": sorted(row["outcome"] for _, rows in group_by_question(of_set.summary) for row in rows),
        "scaling": sorted(row["outcome"] for rows in list_families(of_set) for row in rows),
        "compare": sorted(line.b.row["outcome"] for _, line in against(tmp_path, records, records).lines if line.b),
        "claims": sorted({
            side["outcome"] for finding in find_findings(of_set) for one in finding.comparisons
            for side in (one.before, one.after)
        }),
    }  # fmt: skip


def test_failure_without_a_retry_is_counted_in_every_part_of_the_analysis(tmp_path: Path) -> None:
    early = failed("node_failure", spec("zero1", ranks=1, nodes=2), torch=None)
    seen = list_outcomes(early, run(spec("zero1", ranks=1, nodes=1)), tmp_path=tmp_path)
    assert seen == {key: ["node_failure", "ok"] for key in seen}


def test_failure_with_a_successful_retry_is_not_counted(tmp_path: Path) -> None:
    of = spec("zero1", ranks=1, nodes=2)
    early, again = failed("node_failure", of, torch=None), run(of, attempt=1)
    seen = list_outcomes(early, again, run(spec("zero1", ranks=1, nodes=1)), tmp_path=tmp_path)
    assert seen.pop("claims") == ["ok"]
    assert seen == {key: ["ok", "ok"] for key in seen}


def test_early_failure_is_not_counted_if_its_retry_ran_out_of_memory(tmp_path: Path) -> None:
    of = spec("zero1", ranks=1, nodes=2)
    early, again = failed("node_failure", of, torch=None), failed("oom", of, attempt=1)
    seen = list_outcomes(early, again, run(spec("zero1", ranks=1, nodes=1)), tmp_path=tmp_path)
    assert seen == {key: ["ok", "oom"] for key in seen}
