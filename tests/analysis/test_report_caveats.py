"""Tests of the report's warnings about configurations of which all repeats ran on the same nodes, and about runs of
different code."""

from records import results, run, spec

from analysis.report.caveats import list_caveats
from analysis.report.findings import compute_findings
from bench.core.record import RunRecord


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
