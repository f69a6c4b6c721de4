"""Tests of the gate, a limit on the slowdown of B compared with A. A and B are two sets of runs. The gate fails,
passes, or is inconclusive."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparing import NOISE, against, only, timed
from records import MIB, failed, memory, run, spec, steps

from analysis import results
from analysis.compare import ComparisonSetup, compare
from analysis.compare.judging import Gate
from analysis.compare.phrases import format_headline, list_remarks
from analysis.stats import compare as stats
from analysis.stats.compare import EQUAL, TOO_FEW, count_missing_repeats, find_smallest_slowdown
from bench.core.record import Collective, Link, NodeLoad, RunRecord

SMOKE = Path(__file__).parents[1] / "data" / "runs.zip" / "smoke"
GLOO = Link(backend="gloo", payload_bytes=8, bus_bytes_per_s=1.0)


@pytest.mark.parametrize(
    ("slower", "limit", "held"),
    [
        (1.10, 0.03, "broken"),
        (1.10, 0.12, "kept"),  # the interval ends at 1.113
        (1.10, 0.105, "open"),  # the measured 10 % are below the limit of 10.5 %, but 11.3 % cannot be excluded
        (1.00, 0.03, "kept"),
        (1.00, 0.005, "open"),
        (0.90, 0.03, "kept"),
    ],
)
def test_gate_is_broken_kept_or_open_by_the_interval(tmp_path: Path, slower: float, limit: float, held: str) -> None:
    compared = against(tmp_path, timed(0.100), timed(0.100 * slower), gate=Gate(limit))
    assert only(compared).held == held
    assert compared.verdict == {"broken": "FAIL", "kept": "PASS", "open": "INCONCLUSIVE"}[held]
    strict = against(tmp_path, timed(0.100), timed(0.100 * slower), gate=Gate(limit, strict=True))
    assert (strict.verdict == "FAIL") == (held != "kept")


def test_slowdown_within_the_limit_breaks_a_gate_in_at_most_2_5_percent() -> None:
    """The true slowdown is 2 %, the gate's limit is 3 %, and the noise is 3 %. In more than 30 % of 300 simulated sets,
    a slowdown is detected, but in at most 2.5 % it is shown to exceed the limit."""
    rng, limit, wrong, detected = np.random.default_rng(3), 0.03, [], []
    for _ in range(300):
        ours, theirs = np.exp(0.03 * rng.standard_normal((2, 20, 1)) + [[[0.0]], [[np.log(1.02)]]]).tolist()
        one = stats.compare(theirs, ours, blocked=True)
        detected.append(stats.verdicts([one])[0] == "slower")
        wrong.append(stats.exceed([one], limit)[0])
        assert not (wrong[-1] and one.interval and one.interval.low <= 1 + limit)
    assert np.mean(detected) > 0.3
    assert np.mean(wrong) <= 0.025


def test_sets_of_ten_pairs_at_the_limit_break_a_gate_in_at_most_five_percent() -> None:
    """Each of ten pairs of configurations is exactly 3 % slower in B, which the gate still allows. Without correction
    for ten pairs, 22 % of sets would contain a pair whose slowdown is judged to exceed 3 %."""
    rng, wrong = np.random.default_rng(4), []
    for _ in range(400):
        times = np.exp(0.02 * rng.standard_normal((10, 2, 5, 1)))
        pairs = [stats.compare((1.03 * theirs).tolist(), ours.tolist()) for ours, theirs in times]
        wrong.append(any(stats.exceed(pairs, 0.03)))
    assert np.mean(wrong) <= 0.05


def test_noisy_slowdown_leaves_a_gate_open_with_reasons(tmp_path: Path) -> None:
    line = only(against(tmp_path, timed(0.1, (0.7, 1.0, 1.3)), timed(0.11, (0.7, 1.0, 1.3)), gate=Gate(0.03)))
    assert line.comparison and line.comparison.ratio > 1.03
    assert (line.status, line.held) == ("no detectable difference", "open")
    excluded, seen, more = line.gate_reasons
    assert excluded == "a slowdown above 3 % cannot be excluded"
    assert re.fullmatch(r"a slowdown below \d+ % cannot be detected with these runs", seen)
    assert re.fullmatch(r"(about|over) \d+ more repeats of A and of B would detect 3 %", more)


def test_two_runs_per_side_leave_a_gate_open(tmp_path: Path) -> None:
    for factor in (2.0, 0.5):
        line = only(against(tmp_path, timed(0.1, (0.99, 1.01)), timed(0.1 * factor, (0.99, 1.01)), gate=Gate(0.03)))
        assert (line.status, line.held, line.gate_reasons) == (
            TOO_FEW,
            "open",
            (TOO_FEW, "at least 1 more repeats of A and of B are needed"),
        )
        assert line.comparison and line.comparison.ratio == pytest.approx(factor)
        assert line.comparison.interval and line.comparison.interval.low <= factor <= line.comparison.interval.high


def test_slow_steps_break_a_gate_by_the_mean_at_equal_medians(tmp_path: Path) -> None:
    """In B, two of five steps take twice as long. The median is unchanged, and the mean is 40 % higher."""
    stalled = [
        run(repeat=repeat, steps=steps(tuple(0.1 * by * (2 if step % 5 < 2 else 1) for step in range(30))))
        for repeat, by in enumerate(NOISE[:3])
    ]
    line = only(against(tmp_path, timed(0.1, NOISE[:3]), stalled, gate=Gate(0.03)))
    assert line.a and line.b and line.a.row["step_s"] == line.b.row["step_s"]
    assert line.comparison and line.comparison.ratio == pytest.approx(1.4)
    assert (line.status, line.held, line.gate_reasons) == ("slower", "broken", ("time per sample",))


@pytest.mark.parametrize(
    ("ours", "theirs", "held"),
    [
        (run(), failed("oom"), "broken"),
        (run(), failed("error"), "broken"),
        (run(), failed("preempted"), "open"),
        (run(), failed("cancelled"), "open"),
        (run(), failed("node_failure"), "open"),
        (run(), run(drill="rank=1 step=3 action=exit"), "open"),
        (failed("oom"), run(), None),
        (run(), run(torch="2.14.0"), "open"),
        (run(), run(spec("ddp")), "open"),
        (failed("oom"), failed("oom"), None),
    ],
)
def test_gate_of_pairs_without_times(tmp_path: Path, ours: RunRecord, theirs: RunRecord, held: str | None) -> None:
    (_, first), *_ = against(tmp_path, [ours], [theirs], gate=Gate(0.03)).lines
    assert first.held == held


@pytest.mark.parametrize(("ours", "theirs"), [(run(), run(torch="2.14.0")), (run(), run(spec("ddp")))])
def test_gate_without_comparable_pairs_fails(tmp_path: Path, ours: RunRecord, theirs: RunRecord) -> None:
    assert against(tmp_path, [ours], [theirs], gate=Gate(0.03)).verdict == "FAIL"
    assert against(tmp_path, [ours], [theirs]).verdict is None, "there is no gate"


@pytest.mark.parametrize(("peak", "held"), [(10, "kept"), (10.2, "kept"), (10.4, "broken"), (9, "kept")])
def test_gate_on_memory_uses_the_lowest_peak_of_all_runs(tmp_path: Path, peak: float, held: str) -> None:
    ours = timed(0.1, memory=memory(1, peak=10 * MIB))
    theirs = timed(0.1, memory=memory(1, peak=int(peak * MIB)))
    assert only(against(tmp_path, ours, theirs, gate=Gate(0.03))).held == held


def test_high_peak_of_one_run_does_not_break_a_gate(tmp_path: Path) -> None:
    ours = timed(0.1, memory=memory(1, peak=10 * MIB))
    theirs = [*ours[:-1], run(repeat=4, memory=memory(1, peak=20 * MIB), steps=ours[-1].observations.steps)]
    assert only(against(tmp_path, ours, theirs, gate=Gate(0.03))).held == "kept"


COUNTED = {"collectives": {"all_gather": Collective(calls=3, payload_bytes=800)}, "memory": memory(2, resident_bytes=5)}


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({}, ()),
        ({"parameters": 401}, ("parameters",)),
        ({"collectives": {"all_gather": Collective(calls=4, payload_bytes=800)}}, ("all_gather_calls",)),
        ({"collectives": {"all_gather": Collective(calls=3, payload_bytes=799)}}, ("all_gather_payload_bytes",)),
        ({"memory": memory(2, resident_bytes=6)}, ("resident_bytes",)),
        ({"memory": memory(2, peak=10 * MIB - 1, resident_bytes=5)}, ("peak_allocated_bytes",)),
        ({"memory": memory(2, peak=9 * MIB, resident_bytes=60_000), "link": GLOO}, ()),
        ({"memory": memory(2, resident_bytes=70_000), "link": GLOO}, ("resident_bytes",)),
        ({"memory": memory(2, peak=11 * MIB, resident_bytes=5), "link": GLOO}, ("peak_allocated_bytes",)),
    ],
)
def test_exact_gate_breaks_by_one_byte_on_gpus_and_allows_small_changes_on_cpus(
    tmp_path: Path, change: dict[str, Any], broken: tuple[str, ...]
) -> None:
    link = {"link": change["link"]} if "link" in change else {}
    ours, theirs = timed(0.1, **COUNTED, **link), timed(0.1, **(COUNTED | change))
    assert only(against(tmp_path, ours, theirs, gate=Gate(0.03, exact=True))).gate_reasons == broken
    assert only(against(tmp_path, ours, theirs, gate=Gate(0.03, exact=True, allowed=frozenset(broken)))).held == "kept"


def test_gate_without_exact_ignores_counts(tmp_path: Path) -> None:
    ours, theirs = timed(0.1, **COUNTED), timed(0.1, **COUNTED | {"parameters": 401, "collectives": {}})
    line = only(against(tmp_path, ours, theirs, gate=Gate(0.03)))
    assert (len(line.changes), line.held) == (3, "kept")


def test_longer_sequences_break_an_exact_gate_by_their_flops(tmp_path: Path) -> None:
    longer = spec(sequence={"encoder": 9, "decoder": 2})
    line = only(against(tmp_path, timed(0.1), timed(0.1, of=longer), "sequence", gate=Gate(exact=True)))
    assert line.gate_reasons == ("model_flops", "hardware_flops")


def test_failed_repeat_breaks_an_exact_gate(tmp_path: Path) -> None:
    theirs = [*timed(0.1)[:4], failed("comm_error", repeat=4)]
    assert only(against(tmp_path, timed(0.1), theirs, gate=Gate(exact=True))).gate_reasons == ("some runs failed in B",)


def test_failed_repeat_leaves_a_gate_on_time_undecided(tmp_path: Path) -> None:
    """Runs that fail may be the slow ones, for example if they run out of memory with larger batches."""
    theirs = [*timed(0.1)[:4], failed("oom", repeat=4)]
    line = only(against(tmp_path, timed(0.1), theirs, gate=Gate(0.03)))
    assert (line.held, line.gate_reasons) == ("open", ("some runs failed in B",))
    assert only(against(tmp_path, [*timed(0.1)[:4], failed("oom", repeat=4)], theirs, gate=Gate(0.03))).held == "kept"


@pytest.mark.parametrize(
    ("a", "b", "held"),
    [
        ([], ["preempted"], "kept"),  # the scheduler ended the run
        ([], ["cancelled"], "kept"),
        (["oom"], ["oom"] * 5, "open"),  # a larger share of the runs
        (["oom"] * 5, ["oom"], "kept"),
    ],
)
def test_failed_repeats_count_by_their_share_and_cause(tmp_path: Path, a: list[str], b: list[str], held: str) -> None:
    ours, theirs = ([*timed(0.1), *(failed(kind, repeat=5 + n) for n, kind in enumerate(kinds))] for kinds in (a, b))
    assert only(against(tmp_path, ours, theirs, gate=Gate(0.03))).held == held


def test_gate_is_broken_by_a_failure_before_runs_that_were_ended_from_outside(tmp_path: Path) -> None:
    theirs = [failed("oom", repeat=0), failed("preempted", repeat=1)]
    (_, line), *_ = against(tmp_path, timed(0.1), theirs, gate=Gate(0.03)).lines
    assert line.held == "broken"


@pytest.mark.parametrize(
    ("load", "held"),
    [({"io_pressure_share": 0.15}, "open"), ({"throttled_s": 1.0}, "open"), ({"others_share": 0.3}, "kept")],
)
def test_gate_is_undecided_if_excluded_runs_may_have_slowed_themselves(
    tmp_path: Path, load: dict[str, float], held: str
) -> None:
    """B is slower in the runs that waited for input and output, or were stopped by a quota. These runs are excluded as
    busy. Background load of other processes is a cause outside of the runs."""
    slow = [run(steps=steps((0.12,) * 40), repeat=repeat, load=[NodeLoad(node=0, **load)]) for repeat in (5, 6)]
    line = only(against(tmp_path, timed(0.1), [*timed(0.1), *slow], gate=Gate(0.03)))
    assert line.held == held


def test_recorded_runs_compared_with_themselves_do_not_fail(tmp_path: Path) -> None:
    recorded = results.read([SMOKE])
    compared = compare(recorded, recorded, ComparisonSetup(("a", "b"), gate=Gate(0.5, exact=True)))
    assert len(compared.lines) == 20
    assert {line.status for _, line in compared.lines} == {TOO_FEW}
    assert {line.comparison and line.comparison.ratio for _, line in compared.lines} == {1.0}
    assert not any(line.changes for _, line in compared.lines)
    assert compared.verdict != "FAIL"
    assert len({name for name, _ in compared.lines}) == 20


def test_count_of_missing_repeats_gives_about_80_percent_power() -> None:
    """Ten pairs of configurations have a noise of 2 %. In one pair, B is truly 3 % slower. A comparison states how many
    more repeats are needed. With this number of repeats, the slowdown is detected in about 80 % of simulations."""
    rng, found = np.random.default_rng(1), []
    drawn = np.exp(0.02 * rng.standard_normal((20, 3)))
    three = [stats.compare([[s] for s in drawn[i]], [[s] for s in drawn[i + 10]]) for i in range(10)]
    noise = float(np.mean([one.variance for pair in three for one in pair.noises]))
    three = [pair._replace(noises=tuple(one._replace(variance=noise) for one in pair.noises)) for pair in three]
    more = count_missing_repeats(three[0], 0.03, 10)
    for _ in range(60):
        times = np.exp(np.sqrt(noise) * rng.standard_normal((20, 3 + more)))
        times[0] *= 1.03
        pairs = [stats.compare([[s] for s in times[i]], [[s] for s in times[i + 10]]) for i in range(10)]
        found.append(stats.verdicts(pairs)[0] == "slower")
    assert 0.65 <= np.mean(found) <= 0.98
    assert find_smallest_slowdown(three[0], 10) > 0.03
    assert find_smallest_slowdown(three[0]._replace(unit="step"), 10) is None


@pytest.mark.parametrize(
    ("busy", "status", "runs", "headline_part"),
    [
        (1, EQUAL, (5, 4), "B: 1 of 5 repeats busy"),
        (4, TOO_FEW, (5, 1), "B: 4 of 5 repeats busy"),
        (5, "not comparable", None, "1 with busy runs only"),
    ],
)
def test_busy_runs_are_excluded_from_the_gate_and_counted(
    tmp_path: Path, busy: int, status: str, runs: tuple[int, int] | None, headline_part: str
) -> None:
    """A and B have five runs each of the same configuration. In B, the first `busy` runs had background load and took
    50 % longer."""
    load = ({"node": 0, "others_share": 0.3},)
    theirs = [*timed(0.15, NOISE[:busy], load=load), *timed(0.1)[busy:]]
    compared = against(tmp_path, timed(0.1), theirs, gate=Gate(0.02))
    line = only(compared)
    assert (line.status, line.runs, compared.verdict) == (status, runs, "PASS" if busy == 1 else "INCONCLUSIVE")
    assert headline_part in format_headline(compared)


def test_busy_rounds_of_a_paired_comparison_count_if_kept(tmp_path: Path) -> None:
    """Under growing background load, every round of `zeroscale ab` took 50 % longer than the round before. In each
    round, B is 10 % slower than A.

    If busy runs are kept and compared within each round, the comparison shows that B is 10 % slower. If busy runs are
    excluded, or are not compared within rounds, the comparison is inconclusive.
    """
    load = ({"node": 0, "others_share": 0.3},)
    ours, theirs = (timed(0.1 * by, [noise * 1.5**n for n, noise in enumerate(NOISE)], load=load) for by in (1.0, 1.1))
    kept = against(tmp_path, ours, theirs, gate=Gate(0.03), paired=True, keep_disturbed=True)
    line = only(kept)
    assert line.comparison
    assert (line.status, line.runs, line.comparison.ratio) == ("slower", (5, 5), pytest.approx(1.1))
    assert kept.verdict == "FAIL"
    assert "busy" not in format_headline(kept)
    assert "busy" in list_remarks(line)[-1].split()
    for paired, keep_disturbed in ((True, False), (False, False), (False, True)):
        dropped = against(tmp_path, ours, theirs, gate=Gate(0.03), paired=paired, keep_disturbed=keep_disturbed)
        assert (only(dropped).comparison, dropped.verdict) == (None, "INCONCLUSIVE")
        assert "1 with busy runs only" in format_headline(dropped)


def test_unsteady_runs_count_like_steady_runs(tmp_path: Path) -> None:
    theirs = [run(repeat=n, steps=steps((0.11 * by,) * 30, steady=False)) for n, by in enumerate(NOISE)]
    assert only(against(tmp_path, timed(0.1), theirs, gate=Gate(0.03))).status == "slower"


def test_headline_counts_failed_repeats(tmp_path: Path) -> None:
    theirs = [*timed(0.1)[:3], *(failed("oom", repeat=n) for n in range(3, 10))]
    headline = format_headline(against(tmp_path, timed(0.1), theirs, gate=Gate(0.03)))
    assert "B: 7 of 10 repeats oom" in headline


def test_headline_counts_pairs_left_out(tmp_path: Path) -> None:
    ours = [*timed(0.1), *timed(0.1, of=spec("ddp")), *timed(0.1, of=spec("zero3"))]
    theirs = [*timed(0.1), failed("oom", of=spec("ddp"))]
    headline = format_headline(against(tmp_path, ours, theirs, gate=Gate(0.03)))
    assert headline.startswith("FAIL: ")
    assert "Excluded configurations: 1 out of memory, 1 only in A or only in B." in headline


def test_false_alarm_rate_over_four_looks_at_growing_rounds_is_at_most_seven_percent() -> None:
    """Truly equal pairs are judged four times: after 5, 10, 20 and 40 rounds. With a confidence level of 95 % for each
    of the four judgements, 12 % of the pairs would be judged different at least once. Therefore, each judgement uses a
    higher confidence level."""
    rng, level, wrong = np.random.default_rng(2), Gate(0.03, looks=4).level, []
    assert level == pytest.approx(0.9875)
    for _ in range(300):
        ours, theirs = np.exp(0.02 * rng.standard_normal((2, 40, 1))).tolist()
        headline = [stats.compare(ours[:n], theirs[:n], level, blocked=True) for n in (5, 10, 20, 40)]
        wrong.append(any(stats.verdicts([one], level)[0] in ("faster", "slower") for one in headline))
    assert np.mean(wrong) <= 0.07


def test_reason_names_shared_nodes_if_the_other_side_ran_on_different_nodes(tmp_path: Path) -> None:
    def on(hosts: Sequence[str], seconds: float) -> list[RunRecord]:
        of = spec(ranks=1)
        return [
            run(of, repeat=n, steps=steps((seconds * NOISE[n],) * 30), environment={"hosts": (host,)})
            for n, host in enumerate(hosts)
        ]

    same = only(against(tmp_path, on(("n1", "n2", "n4"), 0.1), on(("n3", "n3", "n3"), 0.11)))
    assert same.status == "slower"
    assert same.why == "repeats of B share nodes (n3), so a slow node looks like a slow configuration"
    assert only(against(tmp_path, on(("n1",) * 3, 0.1), on(("n1",) * 3, 0.11))).why == "", (
        "both sides share the slow node"
    )
    assert only(against(tmp_path, on(("n1", "n2"), 0.1), on(("n3", "n4"), 0.11))).why == ""
