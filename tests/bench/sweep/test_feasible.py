"""Tests of points that are skipped because they are predicted to exceed a device's memory by a wide margin. Points near
the limit must still run."""

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


def predict(made: RunSpec = FOUR) -> Forecast:
    return predict_forecast(made, small(None), "cpu")


def needed(made: RunSpec = FOUR) -> int:
    return predict_memory(made, "cpu").device[0]


def predicted_point() -> SweepPoint:
    return point(FOUR).model_copy(update={"forecast": predict()})


def is_far_out(forecast: Forecast | None, machine: Machine, ranks: int, correction: Correction = UNCORRECTED) -> bool:
    made = point(FOUR).model_copy(update={"forecast": forecast, "devices_per_node": ranks})
    return is_far_out_of_memory(made, machine, correction)


def test_point_is_infeasible_from_a_fifth_above_the_devices_memory() -> None:
    assert is_far_out(predict(), small(0.99 * needed() / FAR_OUT_FACTOR), 2)
    assert not is_far_out(predict(), small(1.01 * needed() / FAR_OUT_FACTOR), 2), "near the edge"
    assert not is_far_out(predict(), small(2 * needed()), 2)


def test_compiled_blocks_have_a_forecast_with_less_memory() -> None:
    plain = spec(batch__micro=64)
    compiled = plain.model_copy(update={"model": plain.model.model_copy(update={"compile": "blocks"})})
    rooms = [predict(made).room for made in (plain, compiled)]
    assert rooms[0] and rooms[1] and rooms[1].tensor_bytes < rooms[0].tensor_bytes


def test_ranks_on_a_cpu_share_the_hosts_memory() -> None:
    process_bytes = 400_000_000
    enough = 2 * (needed() / FAR_OUT_FACTOR + process_bytes)
    shared, larger = (Machine(name="cpu", device="cpu", host_memory_bytes=int(f * enough)) for f in (0.99, 1.01))
    assert is_far_out(predict(), shared, 2) and not is_far_out(predict(), larger, 2)
    assert not is_far_out(predict(), shared, 1)
    outcome = find_infeasible_outcome(predicted_point(), shared, UNCORRECTED)
    assert outcome and outcome.kind == "infeasible" and "GB per rank, but this machine has" in outcome.reason


def test_unknown_memory_device_or_model_is_never_infeasible() -> None:
    assert not is_far_out(predict(), small(None), 2)
    assert not is_far_out(predict_forecast(FOUR, small(1), None), small(1), 2), "device not known yet"
    assert not is_far_out(None, small(1), 2), "without a forecast"
    unknown_model = FOUR.model_copy(update={"model": FOUR.model.model_copy(update={"family": "unknown_model"})})
    assert predict_forecast(unknown_model, small(1), "cpu") == Forecast()


def test_corrections_by_measured_neighbours_revoke_or_extend_infeasibility() -> None:
    out, edge = small(needed() / 1.3), small(needed() / 1.1)
    assert is_far_out(predict(), out, 2) and not is_far_out(predict(), edge, 2)
    assert not is_far_out(predict(), out, 2, Correction(memory=0.9, runs=2)), "1.3 × 0.9 is below 1.2"
    assert is_far_out(predict(), edge, 2, Correction(memory=1.15, runs=2)), "1.1 × 1.15 is above 1.2"
    assert not is_far_out(predict(), small(needed()), 2, Correction(memory=9.0, runs=2)), (
        "the low estimate says that it fits"
    )


def test_evidence_of_an_infeasible_outcome_is_the_whole_prediction() -> None:
    machine = small(needed() / 2)
    found = find_infeasible_outcome(predicted_point(), machine, UNCORRECTED)
    assert found and found.kind == "infeasible" and found.final
    evidence = found.evidence
    phases = evidence["predicted"]["phases"]
    assert max(sum(terms.values()) for terms in phases.values()) == needed() == evidence["predicted"]["low_bytes"]
    assert evidence["machine"] == {"name": "cpu", "memory_bytes": machine.memory_bytes}
    assert set(evidence["formulas"]) == {"zeroscale", "bench.predict", "bench.engines"}
    assert find_infeasible_outcome(predicted_point(), small(needed()), UNCORRECTED) is None


def infeasible_sweep(machine: Machine, micros: tuple[int, ...], **rules: Any) -> SweepDefinition:
    made = [spec(batch__micro=micro) for micro in micros]
    points: list[SweepPoint] = [point(one).model_copy(update={"forecast": predict(one)}) for one in made]
    return sweep(points, **rules).model_copy(update={"machines": {"cpu": machine}})


def local_sweep(folder: Path, made: SweepDefinition) -> LocalSweep:
    wanted = list(made.wanted())
    return LocalSweep(folder, wanted, retry=True, tell=[].append, follow=[].append)


def unanswered(one: LocalSweep) -> list[PlannedRun]:
    return [run for run in one.runs if not find_skip(run, SweepPlan(one.runs), one.snapshot())]


def test_infeasible_point_gets_a_predicted_record_without_a_run(tmp_path: Path) -> None:
    made = infeasible_sweep(small(needed() / 2), (4,))
    first = local_sweep(tmp_path, made)
    ended = first.run()
    assert (ended.good, ended.outcomes) == (False, {"infeasible": 1})
    record = store.read_record(tmp_path / config_id(FOUR) / "0.0" / store.RECORD)
    assert (record.outcome.kind, record.evidence, record.observations) == ("infeasible", "predicted", None)
    again = local_sweep(tmp_path, made)
    assert again.run().skipped == 1, "the resumed sweep finds the answer"


def test_measured_outcome_replaces_the_predicted_one(tmp_path: Path) -> None:
    made = infeasible_sweep(small(needed() / 2), (4,))
    local_sweep(tmp_path, made).run()
    attempt(tmp_path, FOUR, "ok")
    again = local_sweep(tmp_path, made)
    assert again.run().outcomes == {"ok": 1}


def test_without_pruning_a_predicted_record_does_not_answer_its_point(tmp_path: Path) -> None:
    local_sweep(tmp_path, infeasible_sweep(small(needed() / 2), (4,))).run()
    one = local_sweep(tmp_path, infeasible_sweep(small(needed() / 2), (4,), prune=False))
    assert unanswered(one) == one.runs


def test_predicted_record_revoked_by_measured_neighbours_does_not_answer_its_point(tmp_path: Path) -> None:
    made = infeasible_sweep(small(needed() / 1.3), (4,))
    local_sweep(tmp_path, made).run()
    one = local_sweep(tmp_path, made)
    assert unanswered(one) == []
    for repeat in range(2):
        one._corrections_by_neighbours.add(_ran(0.9, repeat))
    assert unanswered(one) == one.runs


def read_view(folder: Path, made: SweepDefinition) -> StudyState:
    seen = read_snapshot(folder)
    return StudyState(folder, [made], seen, {}, list_statuses(merge_sweeps([made]), seen, {}))


def test_submission_records_infeasible_points_and_reopens_them_once_neighbours_revoke_it(
    tmp_path: Path,
) -> None:
    made = infeasible_sweep(small(needed() / 1.3), (4, 1))
    corrections, one = MeasuredCorrections(made.points), spec(batch__micro=1)
    assert write_outcomes_without_run(read_view(tmp_path, made), corrections) == {"infeasible": 1}
    assert write_outcomes_without_run(read_view(tmp_path, made), corrections) == {}, "once"
    view = read_view(tmp_path, made)
    assert {point_status.key.config_id: point_status.outcome for point_status in view.statuses} == {
        config_id(FOUR): "infeasible",
        config_id(one): "",
    }
    assert [point_status.key.config_id for point_status in find_pending(view, corrections)[0]] == [config_id(one)]
    for _ in range(2):
        corrections.add(_ran(0.9, repeat=0))
    assert corrections.correction(made.points[0]) == (1.0, 1.0, 1), "the same run, added twice, counts once"
    corrections.add(_ran(0.9, repeat=1))
    assert {point_status.key.config_id for point_status in find_pending(view, corrections)[0]} == {
        config_id(FOUR),
        config_id(one),
    }
    for _ in range(2):
        attempt(tmp_path, FOUR, "error")
    tried = find_pending(read_view(tmp_path, made), corrections)[0]
    assert [point_status.key.config_id for point_status in tried] == [config_id(one)], "all allowed attempts are used"


def _ran(ratio: float, repeat: int) -> Any:
    """Return the record of a run of the spec FOUR (micro-batch 4) that used `ratio` times the predicted memory.
    `repeat` is the number of its repeat. The record is that of a real run with changed fields."""
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
def test_recorded_runs_are_feasible_on_a_device_of_their_used_memory_but_not_of_half(folder: str) -> None:
    """On a simulated device that has exactly the memory that a recorded run used, the run would fit. So it must not be
    skipped there. On a device with half of this memory, it must be skipped."""
    records = [store.read_record(path) for path in store.find_records([RUNS / folder])]
    ran = [record for record in records if record.outcome.kind == "ok"]
    assert ran
    for record in ran:
        assert record.observations
        ranks = record.observations.memory
        held = max(max(rank.init_peak_bytes or 0, rank.peak_allocated_bytes or 0) for rank in ranks)
        found = predict_forecast(record.spec, small(held), "cpu")
        assert not is_far_out(found, small(held), 2), record.config_id
        assert is_far_out(found, small(held / 2), 2), record.config_id
