"""Points predicted to exceed a device's memory by a wide margin are not run. Points near its limit are run."""

from pathlib import Path
from typing import Any

import pytest
from sweeps import attempt, point, spec, sweep

from bench.core import store
from bench.core.machine import Machine
from bench.core.spec import RunSpec, config_id
from bench.predict.memory import predict_memory
from bench.predict.neighbours import UNCORRECTED, Correction
from bench.sweep.corrections import MeasuredCorrections
from bench.sweep.definition import SweepDefinition, SweepPoint, merge_sweeps
from bench.sweep.forecast import FAR_OUT_FACTOR, Forecast, predict_forecast
from bench.sweep.local_sweep import LocalSweep
from bench.sweep.lost import find_pending, write_outcomes_without_run
from bench.sweep.policy import PlannedRun, SweepPlan, find_skip
from bench.sweep.pruning import find_infeasible_outcome, is_far_out_of_memory
from bench.sweep.snapshot import read_snapshot
from bench.sweep.status import StudyState, list_statuses

RUNS = Path(__file__).parents[2] / "data/runs.zip"
FOUR = spec(batch__micro=4)


def small(memory_bytes: float | None) -> Machine:
    return Machine(name="cpu", device="cpu", memory_bytes=None if memory_bytes is None else int(memory_bytes))


def told(made: RunSpec = FOUR) -> Forecast:
    return predict_forecast(made, small(None), "cpu")


def needed(made: RunSpec = FOUR) -> int:
    return predict_memory(made, "cpu").device[0]


def test_far_out_is_a_fifth_above_the_device_and_the_edge_is_run() -> None:
    assert is_far_out_of_memory(told(), small(0.99 * needed() / FAR_OUT_FACTOR))
    assert not is_far_out_of_memory(told(), small(1.01 * needed() / FAR_OUT_FACTOR)), "near the edge"
    assert not is_far_out_of_memory(told(), small(2 * needed()))


def test_what_nobody_knows_makes_nothing_infeasible() -> None:
    assert not is_far_out_of_memory(told(), small(None))
    assert not is_far_out_of_memory(predict_forecast(FOUR, small(1), None), small(1)), "device not known yet"
    assert not is_far_out_of_memory(None, small(1)), "asked before anything was predicted"
    unheard = FOUR.model_copy(update={"model": FOUR.model.model_copy(update={"family": "unheard"})})
    assert predict_forecast(unheard, small(1), "cpu") == Forecast()


def test_measured_neighbours_take_a_prediction_back_or_add_to_it() -> None:
    out, edge = small(needed() / 1.3), small(needed() / 1.1)
    assert is_far_out_of_memory(told(), out) and not is_far_out_of_memory(told(), edge)
    assert not is_far_out_of_memory(told(), out, Correction(memory=0.9, runs=2)), "1.3 × 0.9 is below 1.2"
    assert is_far_out_of_memory(told(), edge, Correction(memory=1.15, runs=2)), "1.1 × 1.15 is above 1.2"
    assert not is_far_out_of_memory(told(), small(needed()), Correction(memory=9.0, runs=2)), (
        "the low estimate says that it fits"
    )


def test_the_evidence_is_the_whole_prediction() -> None:
    machine = small(needed() / 2)
    found = find_infeasible_outcome(point(FOUR).spec, told(), machine, UNCORRECTED)
    assert found and found.kind == "infeasible" and found.final
    evidence = found.evidence
    phases = evidence["predicted"]["phases"]
    assert max(sum(terms.values()) for terms in phases.values()) == needed() == evidence["predicted"]["low_bytes"]
    assert evidence["machine"] == {"name": "cpu", "memory_bytes": machine.memory_bytes}
    assert set(evidence["formulas"]) == {"zeroscale", "bench.predict", "bench.engines"}
    assert find_infeasible_outcome(point(FOUR).spec, told(), small(needed()), UNCORRECTED) is None


def asked(machine: Machine, micros: tuple[int, ...], **rules: Any) -> SweepDefinition:
    made = [spec(batch__micro=micro) for micro in micros]
    points: list[SweepPoint] = [point(one).model_copy(update={"forecast": told(one)}) for one in made]
    return sweep(points, **rules).model_copy(update={"machines": {"cpu": machine}})


def here(folder: Path, made: SweepDefinition) -> LocalSweep:
    wanted = list(made.wanted())
    return LocalSweep(folder, wanted, retry=True, tell=[].append, follow=[].append)


def left(one: LocalSweep) -> list[PlannedRun]:
    return [run for run in one.runs if not find_skip(run, SweepPlan(one.runs), one.snapshot())]


def test_a_point_far_out_gets_its_record_without_a_run_and_that_is_no_measurement(tmp_path: Path) -> None:
    made = asked(small(needed() / 2), (4,))
    first = here(tmp_path, made)
    ended = first.run()
    assert (ended.good, ended.outcomes) == (False, {"infeasible": 1})
    record = store.read_record(tmp_path / config_id(FOUR) / "0.0" / store.RECORD)
    assert (record.outcome.kind, record.evidence, record.observations) == ("infeasible", "predicted", None)
    again = here(tmp_path, made)
    assert again.run().skipped == 1, "resumed, it has its answer"


def test_a_measured_answer_wins_over_the_prediction(tmp_path: Path) -> None:
    made = asked(small(needed() / 2), (4,))
    here(tmp_path, made).run()
    attempt(tmp_path, FOUR, "ok")
    again = here(tmp_path, made)
    assert again.run().outcomes == {"ok": 1}


def test_where_nothing_may_be_pruned_a_prediction_is_no_answer(tmp_path: Path) -> None:
    here(tmp_path, asked(small(needed() / 2), (4,))).run()
    one = here(tmp_path, asked(small(needed() / 2), (4,), prune=False))
    assert left(one) == one.runs


def test_an_answer_that_measured_neighbours_take_back_is_none(tmp_path: Path) -> None:
    made = asked(small(needed() / 1.3), (4,))
    here(tmp_path, made).run()
    one = here(tmp_path, made)
    assert left(one) == []
    for repeat in range(2):
        one._corrections_by_neighbours.add(_ran(0.9, repeat))
    assert left(one) == one.runs


def view_of(folder: Path, made: SweepDefinition) -> StudyState:
    seen = read_snapshot(folder)
    return StudyState(folder, [made], seen, {}, list_statuses(merge_sweeps([made]), seen, {}))


def test_with_a_queue_it_is_recorded_before_anything_is_submitted_and_started_if_neighbours_take_it_back(
    tmp_path: Path,
) -> None:
    made = asked(small(needed() / 1.3), (4, 1))
    corrections, one = MeasuredCorrections(made.points), spec(batch__micro=1)
    assert write_outcomes_without_run(view_of(tmp_path, made), corrections) == {"infeasible": 1}
    assert write_outcomes_without_run(view_of(tmp_path, made), corrections) == {}, "once"
    view = view_of(tmp_path, made)
    assert {point_status.key.config_id: point_status.outcome for point_status in view.statuses} == {
        config_id(FOUR): "infeasible",
        config_id(one): "",
    }
    assert [point_status.key.config_id for point_status in find_pending(view, corrections).statuses] == [config_id(one)]
    for _ in range(2):
        corrections.add(_ran(0.9, repeat=0))
    assert corrections.correction(made.points[0]) == (1.0, 1.0, 1), "one run, taken in twice"
    corrections.add(_ran(0.9, repeat=1))
    assert {point_status.key.config_id for point_status in find_pending(view, corrections).statuses} == {
        config_id(FOUR),
        config_id(one),
    }
    for _ in range(2):
        attempt(tmp_path, FOUR, "error")
    tried = find_pending(view_of(tmp_path, made), corrections).statuses
    assert [point_status.key.config_id for point_status in tried] == [config_id(one)], "as often as the study allows"


def _ran(ratio: float, repeat: int) -> Any:
    """Return a recorded run, changed into a run of `FOUR` that used `ratio` times the predicted memory."""
    record = store.read_record(next(store.find_records([RUNS / "smoke"])))
    assert record.observations
    alike = [
        rank.model_copy(update={"init_peak_bytes": 0, "warmup_peak_bytes": 0, "peak_allocated_bytes": ratio * needed()})
        for rank in record.observations.memory
    ]
    around = record.circumstance.model_copy(update={"machine": small(None), "repeat": repeat})
    observations = record.observations.model_copy(update={"memory": tuple(alike)})
    update = {"spec": FOUR, "config_id": config_id(FOUR), "circumstance": around, "observations": observations}
    return record.model_copy(update=update)


@pytest.mark.parametrize("folder", ["smoke", "testbed", "memory"])
def test_no_recorded_run_would_have_been_lost_on_the_smallest_device_that_held_it(folder: str) -> None:
    """Each recorded run fits a device with exactly the bytes that it used, so it must not be skipped there.

    On a device with half of these bytes, the prediction must exceed the memory by a wide margin.
    """
    records = [store.read_record(path) for path in store.find_records([RUNS / folder])]
    ran = [record for record in records if record.outcome.kind == "ok"]
    assert ran
    for record in ran:
        assert record.observations
        ranks = record.observations.memory
        held = max(max(rank.init_peak_bytes or 0, rank.peak_allocated_bytes or 0) for rank in ranks)
        found = predict_forecast(record.spec, small(held), "cpu")
        assert not is_far_out_of_memory(found, small(held)), record.config_id
        assert is_far_out_of_memory(found, small(held / 2)), record.config_id
