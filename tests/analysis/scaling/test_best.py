"""Tests of the search for the best configurations: their ranking, ties with the fastest, and the Pareto front of
throughput and memory."""

import numpy as np
import pytest
from clusters import asked, measured, out_of_memory
from records import MIB, results, run, steps

from analysis.scaling import Pace, compare_paces
from analysis.scaling.best import Best, as_table, best, compare_fastest, ranked
from analysis.stats.compare import EQUAL, NOT_DETECTED, TOO_FEW, Verdict
from bench.core.record import RunRecord


def only(*records: RunRecord) -> Best:
    (found,) = best(results(*records))
    return found


def engines(rows: object) -> list[str]:
    return [row["engine"] for row in rows]  # type: ignore[attr-defined]


def one(engine: str, seconds: float, peak: int = 10) -> list[RunRecord]:
    return measured(asked(1, engine=engine), seconds, peak=peak * MIB)


def test_fastest_ties_slower_rivals_and_failures_of_a_question() -> None:
    found = only(*one("ddp", 1.0), *one("zero1", 1.0001), *one("zero3", 1.5), *out_of_memory(asked(1, engine="zero0")))
    assert found.fastest is not None
    assert found.fastest["engine"] == "ddp"
    assert engines(rival.row for rival in found.rivals) == ["zero1", "zero3"]
    assert [rival.verdict for rival in found.rivals] == [EQUAL, "slower"]
    assert engines(found.ties) == ["zero1"]
    assert engines(found.failed) == ["zero0"]


@pytest.mark.parametrize(
    ("times", "verdict", "standing"),
    [
        # The pooled standard deviation of repeats is 1 % or 4 %. With three repeats per side, Student's margin is
        # 2.78 √(2/3) = 2.27 times this standard deviation.
        ([1.005, 1.015, 0.995], EQUAL, EQUAL),  # + 0.5 %: from − 1.8 % to + 2.8 %
        ([1.010, 1.020, 1.000], NOT_DETECTED, "tied"),  # + 1 %: from − 1.3 % to + 3.3 %
        ([1.010, 1.070, 0.950], NOT_DETECTED, "tied"),  # + 1 %, known to 10 % or so
        ([1.040, 1.050, 1.030], "slower", "slower"),  # + 4 %: from + 1.7 %
        ([1.040, 1.050], TOO_FEW, TOO_FEW),
    ],
)
def test_verdict_on_a_rival(times: list[float], verdict: Verdict, standing: str) -> None:
    found = only(*measured(asked(1, engine="ddp"), [1.0, 1.01, 0.99]), *measured(asked(1, engine="zero1"), times))
    (rival,) = found.rivals
    assert (rival.row["engine"], rival.verdict) == ("zero1", verdict)
    assert (found.ties == (rival.row,)) is (verdict in (EQUAL, NOT_DETECTED))
    assert as_table([found])["standing"].tolist() == ["fastest", standing]


def test_micro_batches_are_ranked_by_samples_per_second() -> None:
    small, large = measured(asked(1, micro=2), 1.0), measured(asked(1, micro=4), 1.5)
    found = only(*small, *large)
    assert found.fastest is not None
    assert found.fastest["micro"] == 4
    assert round(found.rivals[0].comparison.ratio, 6) == round((1.0 / 4) / (1.5 / 8), 6)


def test_no_rival_is_faster_than_the_fastest_within_shared_allocations() -> None:
    """Engine b is faster than a in each of three shared allocations. Only engine a also ran in a fourth allocation,
    whose nodes are fast. This lowers the mean time of engine a, but must not make it the fastest engine."""
    runs = {"a": {"1": [1.02], "2": [1.12], "3": [0.92], "4": [0.5]}, "b": {"1": [1.0], "2": [1.1], "3": [0.9]}}
    found = ranked([{"engine": "a"}, {"engine": "b"}], lambda row: Pace(runs[row["engine"]]))
    assert found is not None
    assert found.fastest["engine"] == "b"
    assert found.rivals[0].comparison.ratio > 1


def test_slow_steps_in_the_tail_decide_the_ranking() -> None:
    """In zero2, one step in five takes three times as long. So the median step time of zero2 is lower than that of
    zero1, but its mean is higher. The ranking must use the mean."""
    steady, tails = (
        [[1.02 * by] * 30 for by in (0.999, 1.0, 1.001)],
        [[by * (3.0 if step % 5 == 4 else 1.0) for step in range(30)] for by in (0.999, 1.0, 1.001)],
    )
    records = [
        run(asked(1, engine=engine), repeat=repeat, steps=steps(window))
        for engine, windows in (("zero1", steady), ("zero2", tails))
        for repeat, window in enumerate(windows)
    ]
    found = only(*records)
    (rival,) = found.rivals
    assert found.fastest is not None
    assert (found.fastest["engine"], rival.row["engine"], rival.verdict) == ("zero1", "zero2", "slower")
    assert rival.row["step_s"] < found.fastest["step_s"], "by the median, the other engine would be faster"
    assert rival.comparison.ratio == pytest.approx(1.4 / 1.02)
    assert (rival.row["step_s_p95"], rival.row["step_s_max"]) == pytest.approx((3.0, 3.003))


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_allocations_give_a_ratio_without_a_verdict(count: int) -> None:
    """The two engines differ by ten percent in all steps. With only one or two runs of each, the scatter between runs
    is unknown, so there is no verdict."""
    times = {"zero1": [1.0, 1.01][:count], "zero2": [1.1, 1.11][:count]}
    found = only(*(record for engine, s in times.items() for record in measured(asked(1, engine=engine), s)))
    (rival,) = found.rivals
    assert found.fastest is not None
    assert (found.fastest["engine"], rival.verdict, found.ties) == ("zero1", TOO_FEW, ())
    assert rival.comparison.ratio == pytest.approx(1.1, rel=0.01)
    assert rival.comparison.interval is not None
    assert rival.comparison.interval.low < rival.comparison.ratio < rival.comparison.interval.high
    assert TOO_FEW in [pareto_point.place for pareto_point in found.pareto_points]


def test_the_shown_value_is_the_ranked_value() -> None:
    """ddp takes 1, 1 and 2 s per step in its three allocations, and zero1 always takes 1.1 s. So ddp has the lower
    median, but the higher geometric mean. Both the ranking and the table use the geometric mean."""
    found = only(*measured(asked(1, engine="ddp"), [1.0, 1.0, 2.0]), *measured(asked(1, engine="zero1"), [1.1] * 3))
    assert found.fastest is not None
    assert found.fastest["engine"] == "zero1"
    shown = [row["sample_s"] for row in (found.fastest, found.rivals[0].row)]
    assert shown[1] / shown[0] == pytest.approx(found.rivals[0].comparison.ratio)


def test_each_node_count_is_a_separate_question() -> None:
    records = [*measured(asked(1), 1.0), *measured(asked(2), 1.1)]
    assert [found.question["nodes"] for found in best(results(*records))] == [1, 2]


def test_engines_are_compared_within_allocations() -> None:
    """Step times differ by tens of percent between allocations, and by only one percent between the two engines.
    However, the same engine is faster in every allocation. Therefore the engines do not tie."""
    nodes = [1.0, 1.3, 0.8, 1.1]
    records = [
        run(
            asked(1, engine=engine),
            repeat=i,
            steps=steps((scale * s,) * 7),
            environment={"slurm": {"SLURM_JOB_ID": f"{i}"}},
        )
        for engine, scales in (("zero1", (1, 1, 1, 1)), ("zero2", (1.01, 1.012, 1.009, 1.01)))
        for i, (s, scale) in enumerate(zip(nodes, scales, strict=True))
    ]
    assert only(*records).ties == ()


def test_rehearsals_are_not_ranked() -> None:
    found = only(*measured(asked(1), 1.0, evidence="rehearsed"))
    assert (found.fastest, found.rivals, found.pareto_points) == (None, (), ())


def test_pareto_front_computed_by_hand() -> None:
    """The front has zero3, zero1 and ddp. zero2 needs more memory than zero3 and is slower. zero0 needs more memory
    than zero1 and is slower."""
    records = [*one("zero3", 2.0, 10), *one("zero2", 2.5, 20), *one("zero1", 1.5, 30), *one("zero0", 1.7, 40),
               *one("ddp", 1.0, 50)]  # fmt: skip
    found = only(*records)
    told = [(one.row["engine"], one.place, one.leaner and one.leaner["engine"]) for one in found.pareto_points]
    assert told == [
        ("zero3", "front", None),
        ("zero2", "dominated", "zero3"),
        ("zero1", "front", "zero3"),
        ("zero0", "dominated", "zero1"),
        ("ddp", "front", "zero1"),
    ]


def test_configuration_with_more_memory_and_equal_time_is_tied_with_the_front() -> None:
    found = only(*one("zero2", 1.0, 10), *one("zero1", 1.0001, 20))
    assert [(one.row["engine"], one.place) for one in found.pareto_points] == [("zero2", "front"), ("zero1", "tied")]


def test_front_states_a_verdict_if_its_difference_is_not_detectable() -> None:
    lean, heavy = only(*one("zero2", 1.0001, 10), *one("zero1", 1.0, 20)).pareto_points
    assert (lean.place, lean.verdict) == ("front", None)
    assert (heavy.place, heavy.verdict) == ("front", EQUAL)


def test_fastest_of_equal_memory_is_on_the_front() -> None:
    found = only(*one("zero2", 1.5), *one("zero1", 1.0))
    assert [(one.row["engine"], one.place) for one in found.pareto_points] == [
        ("zero1", "front"),
        ("zero2", "dominated"),
    ]


def test_question_of_failures_has_no_fastest() -> None:
    found = only(*out_of_memory(asked(1)))
    assert (found.fastest, found.ties, found.pareto_points, len(found.failed)) == (None, (), (), 1)


def test_truly_fastest_engine_is_among_fastest_and_ties_in_95_percent() -> None:
    rng, kept, rounds = np.random.default_rng(4), 0, 250
    speeds = {"zero0": 1.0, "zero1": 1.0, "zero2": 0.995, "zero3": 1.02, "ddp": 1.0}
    for _ in range(rounds):
        drawn = {engine: seconds * np.exp(0.01 * rng.standard_normal(3)) for engine, seconds in speeds.items()}
        paces = {engine: Pace({f"{engine}{i}": [one] for i, one in enumerate(runs)}) for engine, runs in drawn.items()}
        found = ranked([{"engine": engine} for engine in speeds], lambda row: paces[row["engine"]])  # noqa: B023
        assert found is not None
        kept += "zero2" in engines((found.fastest, *found.ties))
    assert kept / rounds >= 0.95


@pytest.mark.parametrize(("repeats", "base", "more"), [(3, 2, 1), (5, 2, 1), (10, 2, 1), (5, 4, 4), (5, 1, 3)])
def test_interval_of_an_efficiency_covers_in_spite_of_selected_micro_batches(
    repeats: int, base: int, more: int
) -> None:
    """At the smallest node count, `base` configurations with different micro-batches were measured. At a larger node
    count, `more` configurations with different micro-batches were measured. All of them are truly equally fast, and
    repeats scatter by 1 %. The efficiency compares the fastest measured configurations of the two node counts. This
    selection must not lower the coverage of the interval of the efficiency."""
    rng, holds, pair_alone = np.random.default_rng([repeats, base, more]), [], []
    for _ in range(150):
        drawn = np.exp(0.01 * rng.standard_normal((base + more, repeats)))
        paces = [Pace({f"{place}.{n}": [time] for n, time in enumerate(times)}) for place, times in enumerate(drawn)]
        sides = [sorted(side, key=lambda pace: pace.typical) for side in (paces[:base], paces[base:])]
        chosen = compare_fastest(*sides).interval
        alone = compare_paces(sides[0][0], sides[1][0]).interval
        assert chosen and alone
        holds.append(chosen.low <= 1 <= chosen.high)
        pair_alone.append(alone.low <= 1 <= alone.high)
    assert np.mean(holds) >= 0.92, "95 %, less the scatter of 150 draws"
    assert np.mean(holds) >= np.mean(pair_alone)
