"""Tests of the function that finds out whether a host is in a node list of Slurm, such as n[1-4]. The lists in the
tests are output of `scontrol show hostlist`."""

import pytest

from bench.core.scheduling import find_foreign, is_listed


@pytest.mark.parametrize(
    ("nodelist", "on", "off"),
    [
        ("gpu7", ["gpu7", "GPU7", "gpu7.cluster.example.org"], ["gpu07", "gpu70", "gp7", "7", ""]),
        ("gpu[08-11]", ["gpu08", "gpu11"], ["gpu8", "gpu011", "gpu07", "gpu12", "gpu"]),
        ("gpu[8-11]", ["gpu8", "gpu10"], ["gpu08", "gpu010", "gpu12"]),
        ("a[1-2,5],b,c[03]", ["a1", "a5", "b", "c03"], ["a3", "a4", "b1", "c3", "c"]),
        ("rack[1-2]n[01-16]-ib", ["rack2n16-ib", "rack1n01-ib"], ["rack3n01-ib", "rack1n17-ib", "rack1n1-ib"]),
        ("n[0-4294967295]", ["n4294967295"], ["n4294967296", "m1"]),
        ("", [], ["gpu7", ""]),
    ],
)
def test_host_is_listed_if_slurms_expansion_contains_it(nodelist: str, on: list[str], off: list[str]) -> None:
    assert [host for host in on if not is_listed(host, nodelist)] == []
    assert [host for host in off if is_listed(host, nodelist)] == []


def test_hosts_outside_the_first_nodes_list_are_foreign() -> None:
    assert find_foreign(("hg1", "hg4"), "hg[1-2]") == ("hg4",)
    assert find_foreign(("hg1", "hg2"), "hg[1-2]") == ()


@pytest.mark.parametrize("nodelist", ["", "node[1-2]"])
def test_foreign_hosts_are_unknown_if_host_names_differ_from_node_names(nodelist: str) -> None:
    assert find_foreign(("host1", "host4"), nodelist) == () and find_foreign((), nodelist) == ()
