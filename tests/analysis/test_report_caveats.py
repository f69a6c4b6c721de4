"""Caveats on repeats that always ran on the same nodes."""

from records import results, run, spec

from analysis.report.caveats import list_caveats
from analysis.report.findings import compute_findings
from bench.core.record import RunRecord


def allocations(hosts: list[tuple[str, ...]]) -> list[RunRecord]:
    """Return one run per element of `hosts`, on these hosts."""
    return [run(spec(), repeat=number, environment={"hosts": names}) for number, names in enumerate(hosts)]


def told_of_nodes(*records: RunRecord) -> list[str]:
    return [line for line in list_caveats(compute_findings(results(*records))) if "the same nodes" in line]


def test_intervals_between_allocations_on_the_same_nodes_hold_for_those() -> None:
    (told,) = told_of_nodes(*allocations([("a", "b")] * 3))
    assert told.startswith("1 configuration had the same nodes in all allocations")


def test_other_nodes_a_single_allocation_and_unknown_nodes_are_not_told() -> None:
    assert told_of_nodes(*allocations([("a",), ("b",), ("a",)])) == []
    assert told_of_nodes(*allocations([("a",)])) == []
    assert told_of_nodes(*allocations([(), (), ()])) == []
