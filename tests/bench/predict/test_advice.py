"""Tests of the advice: which configurations are candidates, which candidate is best for each kind of question, and
which candidates count as equal because their difference is within the prediction error."""

import functools
import statistics
from pathlib import Path
from typing import Any

import pytest

from bench.config import compose
from bench.core import store
from bench.core.record import RunRecord
from bench.core.spec import Batch, EngineSpec, RunSpec
from bench.predict.advice import AdviceQuestion, advise, rate_doubt
from bench.predict.advice.candidates import Axes, Candidate, DeviceLimits, search_candidates
from bench.predict.advice.choices import (
    Choice,
    StepEstimate,
    choose,
    compute_extra_share,
    explain_difference,
    is_surely_faster,
)
from bench.predict.memory import predict_memory
from bench.predict.neighbours import MeasuredPoints, collect_measured
from bench.predict.step_time import StepTime, predict_step_time
from bench.predict.step_time.compute import CALIBRATED, REHEARSED
from bench.predict.work import StepFlops

RUNS = Path(__file__).parents[2] / "data/runs.zip/smoke"
H200 = 150_000_000_000


def spec(*overrides: str) -> RunSpec:
    words = ["model=mt5_base", "engine=zero2", "devices_per_node=8", "batch.micro=1", "launcher=slurm", *overrides]
    return compose.compose_request(compose.parse_single(words)).spec


BASE = spec()


@functools.cache
def preset(engine: str) -> EngineSpec:
    return spec(f"engine={engine}").engine


def choice(
    engine: str = "zero2", *, parts: dict[str, float], hidden_s: float = 0.0, rate: tuple[float, float] = (1.0, 2.0),
    nodes: int = 1, micro: int = 1, checkpointing: bool = False, fits: bool | None = True, tokens: int = 1000,
) -> Choice:  # fmt: skip
    """Return a candidate configuration with an invented step time. `parts` has the seconds of each part of the step,
    such as forward. `hidden_s` is the number of seconds in which parts overlap. The predicted seconds of forward,
    recomputation and backward have an interval. Its ends are these seconds times `rate[0]` and times `rate[1]`."""
    batch = Batch(micro=micro, accumulation=1, global_=micro * nodes * 8)
    changes = {"engine": preset(engine), "nodes": nodes, "batch": batch, "activation_checkpointing": checkpointing}
    total = sum(parts.values())
    computing = sum(seconds for name, seconds in parts.items() if name in ("forward", "recomputation", "backward"))
    low, high = total + (rate[0] - 1) * computing, total + (rate[1] - 1) * computing + hidden_s
    time = StepTime(parts, hidden_s, low, high, StepFlops(model=1, hardware=1), tokens, None, "matrix products")
    candidate = Candidate(BASE.model_copy(update=changes), predict_memory(BASE), fits)
    return Choice(candidate, time, StepEstimate(total, low, high, "predicted"))


# -- candidates


def test_candidate_micro_batches_are_1_to_1_5_times_powers_of_2_and_the_largest_that_fits() -> None:
    found = search_candidates([BASE], Axes(nodes=(1,), checkpointing=(False,)), DeviceLimits(H200, "cuda"))
    micros = [candidate.spec.batch.micro for candidate in found.candidates]

    def fits(micro: int) -> bool | None:
        batch = Batch(micro=micro, accumulation=1, global_=8 * micro)
        return predict_memory(BASE.model_copy(update={"batch": batch})).fits(H200)

    assert {1, 2, 3, 4, 6, 8, 12, 16} <= set(micros)
    sure = max(micro for micro in micros if fits(micro))
    assert not fits(sure + 1)
    grid = {2**power * part // 2 for power in range(1, 20) for part in (1, 2, 3)}
    assert set(micros) - grid <= {sure}
    assert fits(min(grid - set(range(max(micros) + 1)))) is False
    assert all(candidate.fits == predict_memory(candidate.spec).fits(H200) for candidate in found.candidates)


def test_candidates_reach_and_never_exceed_the_largest_global_batch() -> None:
    found = search_candidates(
        [BASE], Axes(nodes=(1,), checkpointing=(False,), max_global_batch=100), DeviceLimits(H200, "cuda")
    )
    tried = {(c.spec.batch.micro, c.spec.accumulation) for c in found.candidates}
    # 8 ranks: 100 // 8 = 12 samples per rank, in micro-steps: 12 of 1, 6 of 2, 4 of 3, 3 of 4, 2 of 6, 1 of 8 or 12
    most = {1: (1, 2, 4, 8, 12), 2: (1, 2, 4, 6), 3: (1, 2, 4), 4: (1, 2, 3), 6: (1, 2), 8: (1,), 12: (1,)}
    assert tried == {(micro, number) for micro, numbers in most.items() for number in numbers}
    assert all(c.spec.global_batch <= 100 for c in found.candidates)


def test_candidates_have_exactly_the_requested_global_batch() -> None:
    found = search_candidates(
        [BASE], Axes(nodes=(1, 3), checkpointing=(False,), global_batch=64), DeviceLimits(H200, "cuda")
    )
    assert {(c.spec.batch.micro, c.spec.accumulation) for c in found.candidates} == {(1, 8), (2, 4), (4, 2), (8, 1)}
    assert [left.nodes for left in found.undivided] == [3]  # 64 samples and 24 ranks


def test_points_that_do_not_fit_have_the_missing_bytes() -> None:
    found = search_candidates([BASE], Axes(nodes=(1,), checkpointing=(False,)), DeviceLimits(4_000_000_000, "cuda"))
    assert found.candidates == []
    assert [short.bytes for short in found.short] == [predict_memory(BASE).device[0] - 4_000_000_000]


def test_measured_fit_has_priority_over_predicted_memory() -> None:
    axes = Axes(nodes=(1,), checkpointing=(False,), micro=(1,))
    ran_out = search_candidates([BASE], axes, DeviceLimits(H200, "cuda", seen=lambda point: False))
    assert (ran_out.candidates, len(ran_out.short)) == ([], 1)
    ran = search_candidates([BASE], axes, DeviceLimits(1, "cuda", seen=lambda point: True))
    assert [candidate.fits for candidate in ran.candidates] == [True]


# -- the best choice


def test_advised_choice_depends_on_tokens_node_hours_and_deadline() -> None:
    one = choice(nodes=1, parts={"forward": 10.0})  # 8 devices: 80 device-seconds per step
    four = choice(nodes=4, parts={"forward": 2.0, "all-reduce": 2.0})  # 32 devices: 128
    rows = [one, four]
    tokens = 3.6e6  # 3600 steps: 10 hours (at most 20) for the first, and 4 hours (at most 6) for the second
    assert advise(AdviceQuestion(), rows).winner is one
    assert advise(AdviceQuestion(tokens, node_hours=100), rows).winner is four
    assert advise(AdviceQuestion(tokens, node_hours=23), rows).winner is one  # four may take 6 h of 4 nodes
    assert advise(AdviceQuestion(tokens, deadline_h=21), rows).winner is one
    assert advise(AdviceQuestion(tokens, deadline_h=7), rows).winner is four
    assert advise(AdviceQuestion(tokens, deadline_h=15), rows).winner is four  # `one` may miss the deadline


def test_more_certain_of_two_choices_within_the_error_is_advised() -> None:
    lower, stage_3 = choice("zero1", parts={"forward": 1.0}), choice("zero3", parts={"forward": 0.9})
    advice = advise(AdviceQuestion(), [stage_3, lower])
    assert (advice.winner, advice.ties) == (lower, [stage_3])
    assert "work on the host" in advice.explain_order(stage_3)
    far = choice("zero3", parts={"forward": 0.5})
    assert advise(AdviceQuestion(), [lower, far]).winner is far


def test_among_choices_within_5_percent_fewer_nodes_and_then_larger_micro_batches_are_advised() -> None:
    def on(nodes: int, seconds: float, micro: int = 1) -> Choice:  # the same tokens for each device
        return choice(nodes=nodes, micro=micro, tokens=1000 * nodes * micro, parts={"forward": seconds * micro})

    one, two, many = on(1, 1.04), on(2, 1.03), on(128, 1.0)
    assert advise(AdviceQuestion(), [many, two, one]).winner is one
    assert advise(AdviceQuestion(), [many, two, on(1, 1.06)]).winner is two
    assert advise(AdviceQuestion(), [many, two, one]).explain_order(many) == "equal within 5 %: fewer nodes are advised"
    large = on(1, 1.05, micro=8)
    advice = advise(AdviceQuestion(), [many, one, large, on(1, 1.2, micro=16)])
    assert advice.winner is large
    assert advice.engines[0] is large and advice.nodes == [large, many]
    assert advise(AdviceQuestion(3.6e8, deadline_h=60), [many, two, one]).winner is many, (
        "the others take 104 and 51.5 to 103 h"
    )


def test_among_choices_within_5_percent_one_without_checkpointing_precedes_a_larger_micro_batch() -> None:
    plain = choice(parts={"forward": 1.04}, micro=1)
    checkpointed = choice(parts={"forward": 8.0}, micro=8, tokens=8000, checkpointing=True)
    advice = advise(AdviceQuestion(), [checkpointed, plain])
    assert advice.winner is plain
    assert advice.explain_order(checkpointed) == "equal within 5 %: no checkpointing is advised"


def test_choice_that_may_not_fit_is_advised_only_if_none_surely_fits() -> None:
    sure, perhaps = choice(parts={"forward": 2.0}), choice(micro=2, parts={"forward": 1.0}, fits=None)
    advice = advise(AdviceQuestion(), [sure, perhaps])
    assert (advice.winner, advice.perhaps) == (sure, perhaps)
    assert advise(AdviceQuestion(), [perhaps]).winner is perhaps


def test_choice_beyond_the_deadline_has_the_highest_doubt() -> None:
    slow = choice(parts={"forward": 10.0})
    assert rate_doubt(slow, AdviceQuestion(3.6e6, deadline_h=9)) == 3


def test_advice_lists_the_fastest_choice_of_each_engine() -> None:
    rows = [choice("zero2", parts={"forward": s}, micro=m) for s, m in ((3.0, 1), (2.0, 2))]
    rows.append(choice("zero3", parts={"forward": 5.0}))
    advice = advise(AdviceQuestion(), rows)
    assert [(row.spec.engine.name, row.estimate.step_s) for row in advice.engines] == [("zero2", 2.0), ("zero3", 5.0)]


# -- choices that differ by more than the error


def test_error_shared_by_two_choices_cancels() -> None:
    quick = choice(nodes=1, parts={"forward": 1.0, "all-reduce": 0.1})  # 1.1 to 2.1
    slow = choice(nodes=2, tokens=2000, parts={"forward": 1.0, "all-reduce": 0.2})  # 1.2 to 2.2: they overlap
    assert is_surely_faster(quick, slow, per_device=True)
    assert not is_surely_faster(slow, quick, per_device=True)


@pytest.mark.parametrize(("seconds", "is_sure"), [(1.2, False), (1.25, True)])
@pytest.mark.parametrize("other", [{"micro": 2}, {"engine": "zero1"}, {"checkpointing": True}], ids=str)
def test_errors_of_choices_with_another_batch_or_engine_do_not_cancel(
    seconds: float, is_sure: bool, other: dict[str, Any]
) -> None:
    assert REHEARSED == (0.9, 1.1)  # 1.1 × 1.0 = 1.1 against 0.9 × 1.2 = 1.08 or 0.9 × 1.25 = 1.125
    one, rival = choice(parts={"forward": 1.0}), choice(parts={"forward": seconds}, **other)
    assert is_surely_faster(one, rival, per_device=True) is is_sure


def test_choice_with_stage_3_has_the_larger_error_of_calibrated_rates() -> None:
    other = choice("zero2", parts={"forward": 1.0})
    edge = REHEARSED[0] / CALIBRATED[1]
    assert is_surely_faster(choice("zero3", parts={"forward": 0.99 * edge}), other, per_device=True)
    assert not is_surely_faster(choice("zero3", parts={"forward": 1.01 * edge}), other, per_device=True)


def test_choice_that_is_faster_only_with_hidden_communication_is_not_surely_faster() -> None:
    hiding = choice(nodes=1, parts={"forward": 1.0}, hidden_s=0.5)
    waiting = choice(nodes=2, tokens=2000, parts={"forward": 1.0, "all-reduce": 0.1})
    assert not is_surely_faster(hiding, waiting, per_device=True)
    assert not is_surely_faster(waiting, hiding, per_device=True)


def test_measured_choices_are_compared_by_their_intervals() -> None:
    def measured(low: float, high: float) -> Choice:
        made = choice(parts={"forward": 1.0})
        return made._replace(estimate=StepEstimate((low + high) / 2, low, high, "measured", 3))

    assert is_surely_faster(measured(1.0, 1.1), measured(1.2, 1.3), per_device=True)
    assert not is_surely_faster(measured(1.0, 1.2), measured(1.1, 1.3), per_device=True)


def test_explanation_has_the_parts_of_the_step_that_take_longer() -> None:
    base = choice(parts={"forward": 1.0, "backward": 2.0, "all-reduce": 1.0})
    rival = choice(parts={"forward": 1.0, "recomputation": 0.8, "backward": 2.0, "gather": 1.2, "all-reduce": 0.6})
    assert compute_extra_share(base, rival, per_device=True) == pytest.approx(0.4)
    assert explain_difference(base, rival, per_device=True) == pytest.approx({"gather": 0.3, "recomputation": 0.2})


# -- measured runs in place of predictions


def recorded(engine: str, **changes: Any) -> RunRecord:
    """Return a recorded run of the smoke study with this engine: two processes, micro-batch 4."""
    for path in store.find_records([RUNS]):
        record = store.read_record(path)
        found = record.spec
        if (found.engine.name, found.world_size, found.batch.micro) == (engine, 2, 4):
            return record.model_copy(update=changes)
    raise AssertionError(engine)


@pytest.fixture(scope="module")
def machine() -> Any:
    """Return the machine of the recorded runs. Its file lacks rates that a prediction needs, such as the peak of matrix
    products, so they are added."""
    rates = {"peak_tflops": {"fp32": 0.1}, "memory_bytes_per_s": 1e10, "intra_node_bytes_per_s": 1e9}
    return recorded("zero2").circumstance.machine.model_copy(update=rates)


def chosen(record: RunRecord, machine: Any, *others: RunRecord) -> Choice:
    """Return the candidate with the configuration of `record`, as if this configuration had not been measured. Its step
    time is predicted. If there are measured runs `others`, they correct the prediction."""

    def predict(point: RunSpec) -> StepTime:
        return predict_step_time(point, machine, "cpu")

    found = collect_measured(others, record.spec, machine, lambda point: predict(point).step_s)
    return choose(Candidate(record.spec, predict_memory(record.spec, "cpu"), True), found, predict(record.spec))


def median_s(record: RunRecord) -> float:
    assert record.observations and record.observations.steps
    steps = record.observations.steps
    return statistics.median(steps.step_s[steps.cut :])


def test_measured_point_has_its_measured_time(machine: Any) -> None:
    record = recorded("zero2")
    estimate = chosen(record, machine, record, recorded("zero3")).estimate
    assert (estimate.evidence, estimate.runs) == ("measured", 1)
    assert estimate.step_s == median_s(record)
    assert estimate.low_s < estimate.step_s < estimate.high_s


def test_prediction_is_corrected_by_the_error_at_a_measured_neighbour(machine: Any) -> None:
    measured, other = recorded("zero2"), recorded("zero3")
    off = median_s(measured) / chosen(measured, machine).time.step_s
    estimate, predicted = chosen(other, machine, measured).estimate, chosen(other, machine).time.step_s
    assert (estimate.evidence, estimate.runs) == ("corrected", 1)
    assert estimate.step_s == pytest.approx(off * predicted)
    ends = CALIBRATED[0] * off * predicted, CALIBRATED[1] * off * predicted
    assert (estimate.low_s, estimate.high_s) == pytest.approx(ends)  # larger error after correction


def test_runs_on_another_machine_are_ignored(machine: Any) -> None:
    record = recorded("zero2")
    elsewhere = machine.model_copy(update={"name": "elsewhere"})
    assert collect_measured([record], record.spec, elsewhere, lambda point: 1.0) == MeasuredPoints()


@pytest.mark.parametrize("changes", [{"evidence": "rehearsed"}, {"drill": True}])
def test_rehearsals_and_drills_are_ignored(machine: Any, changes: dict[str, Any]) -> None:
    record = recorded("zero2")
    if changes.pop("drill", False):
        changes["observations"] = record.observations.model_copy(update={"drill": "slow"})  # type: ignore[union-attr]
    assert (
        collect_measured([record.model_copy(update=changes)], record.spec, machine, lambda point: 1.0)
        == MeasuredPoints()
    )


def test_point_with_a_recorded_out_of_memory_error_does_not_fit(machine: Any) -> None:
    record = recorded("zero2")
    oom = record.model_copy(update={"outcome": record.outcome.model_copy(update={"kind": "oom"})})
    found = collect_measured([oom], record.spec, machine, lambda point: 1.0)
    assert found.fits(record.spec) is False
    assert found.fits(recorded("zero3").spec) is None
