"""Tests of the predicted seconds of collectives. They are compared with hand calculations and with published tables of
three machines. In other tests, a machine was calibrated at two link speeds, and times at a third link speed are
predicted."""

import csv
import itertools
from pathlib import Path

import pytest

from bench.config import compose
from bench.core.errors import UserError
from bench.core.machine import Calibration, CollectiveTime, Machine
from bench.predict.step_time.network import RankSpan, change_link_speed, compute_collective_s

NODE = Machine(name="node", intra_node_bytes_per_s=1e11, inter_node_bytes_per_s=1e11)


def published(column: str) -> dict[int, float]:
    """Return the published bus bandwidths of one column of collectives.csv, in bytes/s. The keys are payloads in
    bytes."""
    lines = Path("results/published/collectives.csv").read_text().splitlines()
    rows = csv.DictReader(line for line in lines if not line.startswith("#"))
    return {int(row["payload_bytes"]): 1e9 * float(row[column]) for row in rows}


def test_collective_of_one_rank_or_no_payload_takes_no_time() -> None:
    assert compute_collective_s("all_reduce", 1e9, RankSpan(1, 1), NODE) == 0.0
    assert compute_collective_s("all_reduce", 0, RankSpan(1, 8), NODE) == 0.0


def test_large_all_gather_inside_a_node_equals_a_calculation_by_hand() -> None:
    # 7/8 of 8 GB pass over a link of 100 GB/s, which reaches 233.88 / 300 of its rate
    assert compute_collective_s("all_gather", 8e9, RankSpan(1, 8), NODE) == pytest.approx(7e9 / (1e11 * 233.88 / 300))


def test_all_reduce_takes_the_time_of_a_reduce_scatter_and_an_all_gather() -> None:
    span = RankSpan(4, 32)
    halves = compute_collective_s("reduce_scatter", 1e8, span, NODE) + compute_collective_s(
        "all_gather", 1e8, span, NODE
    )
    assert compute_collective_s("all_reduce", 1e8, span, NODE) == pytest.approx(halves)


def test_small_payloads_take_equal_time() -> None:
    tiny, small = (compute_collective_s("all_reduce", size, RankSpan(1, 8), NODE) for size in (8, 2**15))
    assert tiny == pytest.approx(small, rel=0.02)


def test_slow_links_wait_no_longer_than_fast_links() -> None:
    """The latency of a collective, in its hops and in software, does not depend on the speed of the link. So on a slow
    link, nearly all of the time is spent on the transfer of the bytes: 2 · 63/64 · 25 MiB at 1.25 GB/s take 41.3 ms."""
    ethernet = NODE.model_copy(update={"inter_node_bytes_per_s": 1.25e9})
    seconds = compute_collective_s("all_reduce", 25 * 2**20, RankSpan(8, 64), ethernet)
    assert 0.0413 < seconds < 1.1 * 0.0413


@pytest.mark.parametrize(("span", "bytes_per_s", "payload", "published_s", "allowed"), [
    # https://github.com/NVIDIA/nccl-tests/issues/119: 8 A100 and 4 × 200 Gbit/s per node
    (RankSpan(3, 24), 1e11, 131_072_008, 2604.6e-6, 0.25),
    # https://github.com/NVIDIA/nccl-tests/issues/232: 1 H100 per node, which reaches one link of 400 Gbit/s
    (RankSpan(2, 2), 5e10, 2 * 2**20, 113.2e-6, 0.3),
    (RankSpan(2, 2), 5e10, 4 * 2**20, 154.4e-6, 0.2),
    (RankSpan(2, 2), 5e10, 8 * 2**20, 231.4e-6, 0.1),
    (RankSpan(2, 2), 5e10, 16 * 2**20, 420.5e-6, 0.1),
    (RankSpan(2, 2), 5e10, 32 * 2**20, 812.3e-6, 0.1),
    # https://github.com/NVIDIA/nccl/issues/812: 192 GB/s between DGX A100 of 8 × 200 Gbit/s
    (RankSpan(2, 16), 2e11, 8 * 2**30, 2 * 15 / 16 * 8 * 2**30 / 192e9, 0.05),
])  # fmt: skip
def test_all_reduces_on_links_of_other_speeds_take_their_published_times(
    span: RankSpan, bytes_per_s: float, payload: int, published_s: float, allowed: float
) -> None:
    """No constant of the prediction was chosen from the published times of this test."""
    machine = Machine(name="other", intra_node_bytes_per_s=3e11, inter_node_bytes_per_s=bytes_per_s)
    assert compute_collective_s("all_reduce", payload, span, machine) == pytest.approx(published_s, rel=allowed)


def test_rings_over_more_nodes_wait_longer_and_trees_hardly() -> None:
    node = NODE.model_copy(update={"intra_node_bytes_per_s": 1e12})
    gathers = [compute_collective_s("all_gather", 2e8, RankSpan(n, 8 * n), node) for n in (4, 16, 128)]
    assert gathers[1] - gathers[0] == pytest.approx(
        12 * 14e-6 + 84 * 3.4e-6 + 2e8 * (1 / 32 - 1 / 128) / 94.3e9, rel=0.01
    )
    assert gathers[2] > 2 * gathers[0]
    reduces = [compute_collective_s("all_reduce", 2e8, RankSpan(n, 8 * n), node) for n in (4, 128)]
    assert reduces[0] < reduces[1] < 1.2 * reduces[0]


@pytest.mark.parametrize(("machine", "column", "span", "allowed"), [
    ("a100_80", "a100x8_nvlink3", RankSpan(1, 8), 0.01),  # the source of the efficiency curve
    ("b200", "b200_4nodes_8x50GBs", RankSpan(4, 32), 0.01),
    ("h200", "h200x8_nvlink4_nvls", RankSpan(1, 8), 1.2),  # NVLS sums in the switches, not in a ring
    ("b200", "b200x8", RankSpan(1, 8), 0.95),
])  # fmt: skip
def test_all_reduce_times_are_close_to_published_bandwidths(
    machine: str, column: str, span: RankSpan, allowed: float
) -> None:
    found = compose.compose_request([("machine", machine), ("devices_per_node", 8)], None).machine
    for payload, bus in published(column).items():
        if 2**18 <= payload <= 2**32:
            seconds = 2 * span.wire * payload / bus
            assert compute_collective_s("all_reduce", payload, span, found) == pytest.approx(seconds, rel=allowed), (
                payload
            )


def test_machine_without_a_link_speed_is_refused() -> None:
    alone = Machine(name="alone", intra_node_bytes_per_s=1e11)
    with pytest.raises(UserError, match=r"machine\.inter_node_bytes_per_s: unknown for machine=alone"):
        compute_collective_s("all_reduce", 1e9, RankSpan(2, 16), alone)


def calibrated(speed: float, *seconds: float) -> Machine:
    rows = (
        CollectiveTime(kind="all_reduce", nodes=2, ranks=2, payload_bytes=size, s=s)
        for size, s in zip((1000, 1_000_000), seconds, strict=True)
    )
    return Machine(name="bed", inter_node_bytes_per_s=speed, calibration=Calibration(collectives=tuple(rows)))


def test_calibrated_collectives_replace_link_speeds_and_are_interpolated() -> None:
    bed = calibrated(1e7, 0.001, 0.101)
    assert compute_collective_s("all_reduce", 500_500, RankSpan(2, 2), bed) == pytest.approx(0.051)
    assert compute_collective_s("all_reduce", 2_000_000, RankSpan(2, 2), bed) == pytest.approx(0.202)
    assert compute_collective_s("all_reduce", 8, RankSpan(2, 2), bed) == 0.001


def test_calibrations_at_two_link_speeds_give_times_at_a_third() -> None:
    # 1 ms of software, and 1 MB on the wire: 0.101 s at 10 MB/s, 0.011 s at 100 MB/s, so 0.026 s at 40 MB/s
    slow, fast = calibrated(1e7, 0.001, 0.101), calibrated(1e8, 0.001, 0.011)
    between = change_link_speed(slow, fast, 4e7)
    assert compute_collective_s("all_reduce", 1_000_000, RankSpan(2, 2), between) == pytest.approx(0.026)
    assert between.inter_node_bytes_per_s == 4e7


def test_calibrations_at_one_link_speed_are_refused_for_another() -> None:
    bed = calibrated(1e7, 0.001, 0.101)
    with pytest.raises(UserError, match="two link speeds"):
        change_link_speed(bed, bed, 4e7)


@pytest.mark.parametrize("span", [RankSpan(1, 8), RankSpan(4, 32)])
def test_more_bytes_never_take_less_time(span: RankSpan) -> None:
    """The published bus bandwidth is four times as high for 4 MiB as for 1 MiB, so both payloads take about the same
    time. No payload between 1 and 4 MiB may be predicted to take less time than 1 MiB."""
    seconds = [compute_collective_s("all_reduce", 2 ** (step / 4), span, NODE) for step in range(40, 140)]
    assert all(more >= less * (1 - 1e-12) for less, more in itertools.pairwise(seconds))
