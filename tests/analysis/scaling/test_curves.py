"""Tests of efficiency, speed-up and serial fraction over node counts. They are compared with values computed
by hand."""

from typing import Any

import numpy as np
import pytest
from clusters import asked, measured, out_of_memory, repeats
from records import failed, results
from scipy import stats

from analysis.scaling.curves import ScalingCurve, build_curves
from bench.core.record import RunRecord


def only(*records: RunRecord, **picked: str) -> ScalingCurve:
    found = [
        curve for curve in build_curves(results(*records)) if all(getattr(curve, k) == v for k, v in picked.items())
    ]
    assert len(found) == 1, [curve.name for curve in found]
    return found[0]


def strong(seconds: dict[int, float], samples: int = 64, **more: Any) -> list[RunRecord]:
    return [record for n, s in seconds.items() for record in measured(asked(n, samples=samples, **more), s)]


def weak(seconds: dict[int, float], **more: Any) -> list[RunRecord]:
    return [record for n, s in seconds.items() for record in measured(asked(n, **more), s)]


def test_strong_scaling_efficiency_computed_by_hand() -> None:
    curve = only(*strong({1: 8.0, 2: 5.0, 4: 4.0}))
    assert (curve.law, curve.batch) == ("strong", "equal micro-batch")
    assert curve.name == "zero2, micro 2, 64 samples per step"
    assert [point.nodes for point in curve.points] == [1, 2, 4]
    assert [point.speedup.value for point in curve.points if point.speedup] == pytest.approx([1, 1.6, 2])
    assert [point.efficiency.value for point in curve.points if point.efficiency] == pytest.approx([1, 0.8, 0.5])


def test_weak_scaling_efficiency_computed_by_hand() -> None:
    curve = only(*weak({1: 1.0, 2: 1.25, 4: 2.0}))
    assert (curve.law, curve.name) == ("weak", "zero2, micro 2, 2 samples per step and device")
    assert [point.efficiency.value for point in curve.points if point.efficiency] == pytest.approx([1, 0.8, 0.5])
    assert [point.speedup.value for point in curve.points if point.speedup] == pytest.approx([1, 1.6, 2])
    assert {point.serial_fraction for point in curve.points} == {None}, "the curve compares the same work on more nodes"


def test_serial_fraction_of_amdahls_law_is_recovered_at_every_node_count() -> None:
    curve = only(*strong({n: 0.1 + 0.9 / n for n in (1, 2, 4, 8)}))
    first, *others = (point.serial_fraction for point in curve.points)
    assert first is None
    assert [fraction.value for fraction in others if fraction] == pytest.approx([0.1] * 3)


def test_base_of_a_curve_is_its_smallest_measured_node_count() -> None:
    records = [*out_of_memory(asked(1, samples=64)), *strong({2: 6.0, 4: 4.0})]
    curve = only(*records)
    assert curve.base is not None
    assert curve.base.nodes == 2
    assert curve.base.row["step_s_low"] < 6 < curve.base.row["step_s_high"]
    assert curve.base.efficiency == curve.base.speedup == (1, None), "by definition, so without an interval"
    last = curve.points[-1]
    assert last.speedup is not None
    assert last.efficiency is not None
    assert last.serial_fraction is not None
    assert (last.speedup.value, last.efficiency.value) == pytest.approx((1.5, 0.75))
    assert last.serial_fraction.value == pytest.approx((1 / 1.5 - 1 / 2) / (1 - 1 / 2))


def test_failed_points_of_a_curve_have_no_number() -> None:
    curve = only(*strong({1: 8.0, 2: 5.0}), *out_of_memory(asked(4, samples=64)))
    last = curve.points[-1]
    assert (last.nodes, last.row["outcome"], last.row["n"]) == (4, "oom", 0)
    assert (last.speedup, last.efficiency, last.serial_fraction) == (None, None, None)


def test_a_curve_of_failures_has_no_base() -> None:
    curve = only(*(record for n in (1, 2) for record in out_of_memory(asked(n))), law="weak")
    assert curve.base is None
    assert [point.row["outcome"] for point in curve.points] == ["oom", "oom"]


def test_failure_with_unknown_environment_joins_the_curve_of_its_spec() -> None:
    early = failed("hang", asked(4, samples=64), torch=None)
    curve = only(*strong({1: 8.0, 2: 5.0}), early)
    assert [point.row["outcome"] for point in curve.points] == ["ok", "ok", "hang"]
    again = measured(asked(4, samples=64), 4.0, attempt=1)
    assert [point.row["outcome"] for point in only(*strong({1: 8.0, 2: 5.0}), early, *again).points] == ["ok"] * 3


def test_interval_is_between_repeats_from_three_allocations_on() -> None:
    ours, theirs = repeats(8.0, 0.02, seed=1), repeats(5.0, 0.02, seed=2)
    curve = only(*measured(asked(1, samples=64), ours), *measured(asked(2, samples=64), theirs))
    test = stats.ttest_ind(np.log(ours), np.log(theirs), equal_var=False)
    low, high = np.exp(test.confidence_interval(0.95))
    last = curve.points[-1]
    for estimate, factor in ((last.speedup, 1), (last.efficiency, 1 / 2)):
        assert estimate is not None
        assert estimate.interval is not None
        assert estimate.interval[:2] == pytest.approx((low * factor, high * factor))
        assert estimate.interval[2:] == ("between repeats", 0.95, 6)


def test_interval_is_within_the_runs_below_three_allocations() -> None:
    last = only(*measured(asked(1, samples=64), [8.0]), *measured(asked(2, samples=64), [5.0])).points[-1]
    assert last.speedup is not None
    assert last.speedup.interval is not None
    assert last.speedup.interval.low < 1.6 < last.speedup.interval.high
    assert last.speedup.interval[2:] == ("within the runs", 0.95, 60)


def test_serial_fraction_decreases_with_the_speedup() -> None:
    last = only(*strong({1: 8.0, 2: 5.0})).points[-1]
    assert last.speedup is not None
    assert last.speedup.interval is not None
    assert last.serial_fraction is not None
    assert last.serial_fraction.interval is not None
    assert last.serial_fraction.interval.low == pytest.approx(2 / last.speedup.interval.high - 1)
    assert last.serial_fraction.interval.high == pytest.approx(2 / last.speedup.interval.low - 1)
    assert last.serial_fraction.interval[2:] == last.speedup.interval[2:]


def test_curves_of_equal_and_of_best_micro_batch() -> None:
    """On 1 node, micro-batch 2 reaches 4 samples per second, and micro-batch 4 reaches 8. On 2 nodes, they reach 10 and
    8 samples per second. So the best micro-batch is 4 on 1 node, and 2 on 2 nodes."""
    times = {(1, 2): 1.0, (1, 4): 1.0, (2, 2): 0.8, (2, 4): 2.0}
    records = [record for (n, micro), s in times.items() for record in measured(asked(n, micro=micro), s)]
    found = {curve.name: curve for curve in build_curves(results(*records))}
    last = {name: curve.points[-1] for name, curve in found.items()}
    assert {name: point.efficiency.value for name, point in last.items() if point.efficiency} == {
        "zero2, micro 2, 2 samples per step and device": pytest.approx(1.25),
        "zero2, micro 4, 4 samples per step and device": pytest.approx(0.5),
        "zero2, best micro-batch, 1 micro-step": pytest.approx((10 / 2) / (8 / 1)),
    }
    best = found["zero2, best micro-batch, 1 micro-step"]
    assert [point.row["micro"] for point in best.points] == [4, 2]
    assert [point.micros for point in best.points] == [(2, 4), (2, 4)]


def test_best_micro_batch_lists_ties_and_failed_micro_batches() -> None:
    alike = [*measured(asked(1, micro=2), 1.0), *measured(asked(1, micro=4), 2.0)]
    records = [*alike, *out_of_memory(asked(1, micro=8)), *measured(asked(2, micro=2), 1.0)]
    first = only(*records, law="weak", batch="best micro-batch").points[0]
    assert first.micros == (2, 4, 8)
    assert {first.row["micro"], *(row["micro"] for row in first.tied)} == {2, 4}


def test_no_best_micro_batch_if_the_global_batch_determines_it() -> None:
    """A global batch of 8 without accumulation requires micro-batch 4 on one node and micro-batch 2 on two nodes. Since
    each node count has only one possible micro-batch, there is no curve of the best micro-batch."""
    records = [*measured(asked(1, micro=4), 1.0), *measured(asked(2, micro=2), 0.6)]
    assert build_curves(results(*records)) == ()


def test_fixed_global_batch_gives_only_strong_scaling_curves() -> None:
    asking = [asked(n, micro=micro, samples=64) for n in (1, 2, 4) for micro in (1, 2, 4)]
    found = build_curves(results(*(record for of in asking for record in measured(of, 1.0))))
    assert sorted(curve.name for curve in found) == [
        "zero2, best micro-batch, 64 samples per step",
        *(f"zero2, micro {micro}, 64 samples per step" for micro in (1, 2, 4)),
    ]


@pytest.mark.parametrize(
    ("of", "around"),
    [
        ({"precision": "bf16"}, {}),
        ({"ranks": 4}, {}),
        ({"activation_checkpointing": True}, {}),
        ({"sequence": {"encoder": 8, "decoder": 4}}, {}),
        ({"engine": "zero3"}, {}),
        ({"seed": 1}, {}),
        ({"model": {"name": "other"}}, {}),
        ({"model": {"attention": "eager"}}, {}),
        ({}, {"machine": {"name": "faster"}}),
        ({}, {"torch": "3.0"}),
        ({}, {"evidence": "rehearsed"}),
    ],
)
def test_points_that_differ_in_more_than_nodes_form_no_curve(of: dict[str, Any], around: dict[str, Any]) -> None:
    records = [*measured(asked(1, samples=64), 8.0), *measured(asked(2, samples=64, **of), 5.0, **around)]
    assert build_curves(results(*records)) == ()


def test_published_scaling_of_t5_3b() -> None:
    """The input is NVIDIA's published encoder tokens per second of T5-3B on nodes of 8 A100-80GB.

    Source: README of NVIDIA's NeMo-Megatron-Launcher, tag 23.08.02, section 7.2. Tensor parallelism of 2 gives four
    data-parallel ranks per node. Global batch 2160, micro-batch 27, 512 encoder tokens.
    """
    tokens_per_s = {1: 110769, 2: 215579, 4: 417644, 5: 515100, 10: 957506, 20: 1626353}
    records = strong({n: 2160 * 512 / rate for n, rate in tokens_per_s.items()}, samples=2160, micro=27, ranks=4)
    curve = only(*records)
    told = {point.nodes: point.efficiency.value for point in curve.points if point.efficiency}
    by_hand = {1: 1.0, 2: 0.9731, 4: 0.9426, 5: 0.9300, 10: 0.8644, 20: 0.7341}
    assert told == pytest.approx(by_hand, abs=5e-5)
    assert told == pytest.approx({n: rate / (n * tokens_per_s[1]) for n, rate in tokens_per_s.items()})
    last = curve.points[-1].serial_fraction
    assert last is not None
    assert last.value == pytest.approx(0.01906, abs=5e-6)
