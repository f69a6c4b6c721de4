"""Tests of the report's warnings about configurations of which all repeats ran on the same nodes, and about runs of
different code."""

from pathlib import Path

from records import results, run, save, spec

from analysis.report.caveats import list_caveats, list_unfinished_sweeps
from analysis.report.findings import compute_findings
from analysis.results import read
from bench.core.machine import Machine
from bench.core.record import RunRecord
from bench.core.spec import config_id
from bench.sweep import definition
from bench.sweep.definition import SweepDefinition, SweepPoint, SweepRules


def allocations(hosts: list[tuple[str, ...]]) -> list[RunRecord]:
    """Return one run per element of `hosts`. Each run has its own allocation, which consists of these hosts."""
    return [run(spec(), repeat=number, environment={"hosts": names}) for number, names in enumerate(hosts)]


def list_node_caveats(*records: RunRecord) -> list[str]:
    return [line for line in list_caveats(compute_findings(results(*records))) if "the same nodes" in line]


def test_caveat_counts_configurations_with_equal_nodes_in_all_allocations() -> None:
    (caveat,) = list_node_caveats(*allocations([("a", "b")] * 3))
    assert caveat.startswith("1 configuration ran on the same nodes in all allocations")


def test_no_caveat_for_different_nodes_one_allocation_or_unknown_nodes() -> None:
    assert list_node_caveats(*allocations([("a",), ("b",), ("a",)])) == []
    assert list_node_caveats(*allocations([("a",)])) == []
    assert list_node_caveats(*allocations([(), (), ()])) == []


def test_caveat_names_the_versions_of_a_package_with_plugins() -> None:
    def list_version_caveats(*versions: str) -> list[str]:
        runs = [run(repeat=number, environment={"versions": {"plug-in mine": one, "python": f"3.{number}"}})
                for number, one in enumerate(versions)]  # fmt: skip
        return [line for line in list_caveats(compute_findings(results(*runs, run()))) if "pooled nevertheless" in line]

    (caveat,) = list_version_caveats("1 (files a)", "1 (files b)", "1 (files a)")
    assert caveat.startswith("Runs were made with 2 versions of the plug-in mine: 1 (files a), 1 (files b).")
    assert list_version_caveats("1 (files a)", "1 (files a)") == []


def test_caveat_if_runs_of_several_commits_are_pooled() -> None:
    def list_commit_caveats(*commits: str) -> list[str]:
        runs = [run(repeat=number, environment={"git": {"commit": one, "dirty": False}})
                for number, one in enumerate(commits)]  # fmt: skip
        return [line for line in list_caveats(compute_findings(results(*runs))) if "several commits" in line]

    (caveat,) = list_commit_caveats("a" * 40, "b" * 40)
    assert caveat.startswith("Runs of several commits of zeroscale are pooled") and "zeroscale history" in caveat
    assert list_commit_caveats("a" * 40, "a" * 40) == []


def test_report_counts_the_runs_of_a_sweep_without_a_final_result(tmp_path: Path) -> None:
    study = tmp_path / "s"
    specs = [spec(micro=micro) for micro in (2, 4, 8)]
    points = [
        SweepPoint(config_id=config_id(made), line="", machine="cpu", nodes=made.nodes, devices_per_node=1,
                   time_limit_min=1, overrides=(), spec=made.model_dump(mode="json", by_alias=True))
        for made in specs
    ]  # fmt: skip
    sweep = SweepDefinition(
        study="s", asked_at="2026-11-21T12:00:00+00:00", machines={"cpu": Machine(name="cpu", device="cpu")},
        launcher={"name": "local"}, rules=SweepRules(), points=tuple(points), order=((0, 0), (0, 1), (0, 2)),
    )  # fmt: skip
    definition.write(study, sweep)
    outcomes = [run().outcome.model_copy(update={"kind": kind}) for kind in ("ok", "hang", "oom")]
    runs = [run(made, study="s").model_copy(update={"outcome": one}) for made, one in zip(specs, outcomes, strict=True)]
    save(tmp_path, *runs)
    (line,) = list_unfinished_sweeps(read([study]))
    assert line == "The sweep has not ended: 1 of 3 runs of s has no final result."
