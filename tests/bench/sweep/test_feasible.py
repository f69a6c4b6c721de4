"""Which points are predicted far out of memory, and which are run all the same."""

from pathlib import Path
from typing import Any

import pytest
from sweeps import attempt, point, spec, sweep

from bench import store
from bench.dispatch.settle import due, prune
from bench.dispatch.view import View
from bench.local.here import Asked, Here
from bench.machine import Machine
from bench.predict.memory import memory
from bench.predict.neighbours import UNCORRECTED, Correction
from bench.spec import RunSpec, config_id
from bench.sweep.asked import Point, Sweep, union
from bench.sweep.feasible import far_out, infeasible
from bench.sweep.forecast import FAR_OUT, Forecast, forecast
from bench.sweep.neighbourhood import Neighbourhood
from bench.sweep.policy import PlannedRun, SweepPlan, known
from bench.sweep.standing import standings
from bench.sweep.survey import survey

RUNS = Path(__file__).parents[2] / "data/runs"
FOUR = spec(batch__micro=4)


def small(memory_bytes: float | None) -> Machine:
    return Machine(name="cpu", device="cpu", memory_bytes=None if memory_bytes is None else int(memory_bytes))


def told(made: RunSpec = FOUR) -> Forecast:
    return forecast(made, small(None), "cpu")


def needed(made: RunSpec = FOUR) -> int:
    return memory(made, "cpu").device[0]


def test_far_out_is_a_fifth_above_the_device_and_the_edge_is_run() -> None:
    assert far_out(told(), small(0.99 * needed() / FAR_OUT))
    assert not far_out(told(), small(1.01 * needed() / FAR_OUT)), "near the edge"
    assert not far_out(told(), small(2 * needed()))


def test_what_nobody_knows_makes_nothing_infeasible() -> None:
    assert not far_out(told(), small(None))
    assert not far_out(forecast(FOUR, small(1), None), small(1)), "device not known yet"
    assert not far_out(None, small(1)), "asked before anything was predicted"
    unheard = FOUR.model_copy(update={"model": FOUR.model.model_copy(update={"family": "unheard"})})
    assert forecast(unheard, small(1), "cpu") == Forecast()


def test_measured_neighbours_take_a_prediction_back_or_add_to_it() -> None:
    out, edge = small(needed() / 1.3), small(needed() / 1.1)
    assert far_out(told(), out) and not far_out(told(), edge)
    assert not far_out(told(), out, Correction(memory=0.9, runs=2)), "1.3 × 0.9 is below 1.2"
    assert far_out(told(), edge, Correction(memory=1.15, runs=2)), "1.1 × 1.15 is above 1.2"
    assert not far_out(told(), small(needed()), Correction(memory=9.0, runs=2)), "the low estimate says that it fits"


def test_the_evidence_is_the_whole_prediction() -> None:
    machine = small(needed() / 2)
    found = infeasible(point(FOUR).spec, told(), machine, UNCORRECTED)
    assert found and found.kind == "infeasible" and found.final
    evidence = found.evidence
    phases = evidence["predicted"]["phases"]
    assert max(sum(terms.values()) for terms in phases.values()) == needed() == evidence["predicted"]["low_bytes"]
    assert evidence["machine"] == {"name": "cpu", "memory_bytes": machine.memory_bytes}
    assert set(evidence["formulas"]) == {"zeroscale", "bench.predict", "bench.engines"}
    assert infeasible(point(FOUR).spec, told(), small(needed()), UNCORRECTED) is None


def asked(machine: Machine, micros: tuple[int, ...], **rules: Any) -> Sweep:
    made = [spec(batch__micro=micro) for micro in micros]
    points: list[Point] = [point(one).model_copy(update={"forecast": told(one)}) for one in made]
    return sweep(points, **rules).model_copy(update={"machines": {"cpu": machine}})


def here(folder: Path, made: Sweep) -> Here:
    wanted = [Asked(key, made, one) for key, one in made.wanted()]
    return Here(folder, wanted, retry=True, tell=[].append, follow=[].append)


def left(one: Here) -> list[PlannedRun]:
    return [run for run in one.runs if not known(run, SweepPlan(one.runs), one.snapshot())]


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
        one._neighbourhood.add(_ran(0.9, repeat))
    assert left(one) == one.runs


def view_of(folder: Path, made: Sweep) -> View:
    seen = survey(folder)
    return View(folder, [made], seen, {}, standings(union([made]), seen, {}))


def test_with_a_queue_it_is_recorded_before_anything_is_submitted_and_started_if_neighbours_take_it_back(
    tmp_path: Path,
) -> None:
    made = asked(small(needed() / 1.3), (4, 1))
    neighbourhood, one = Neighbourhood(made.points), spec(batch__micro=1)
    assert prune(view_of(tmp_path, made), neighbourhood) == {"infeasible": 1}
    assert prune(view_of(tmp_path, made), neighbourhood) == {}, "once"
    view = view_of(tmp_path, made)
    assert {standing.key.config_id: standing.outcome for standing in view.standings} == {
        config_id(FOUR): "infeasible",
        config_id(one): "",
    }
    assert [standing.key.config_id for standing in due(view, neighbourhood).standings] == [config_id(one)]
    for _ in range(2):
        neighbourhood.add(_ran(0.9, repeat=0))
    assert neighbourhood.correction(made.points[0]) == (1.0, 1.0, 1), "one run, taken in twice"
    neighbourhood.add(_ran(0.9, repeat=1))
    assert {standing.key.config_id for standing in due(view, neighbourhood).standings} == {
        config_id(FOUR),
        config_id(one),
    }
    for _ in range(2):
        attempt(tmp_path, FOUR, "error")
    tried = due(view_of(tmp_path, made), neighbourhood).standings
    assert [standing.key.config_id for standing in tried] == [config_id(one)], "as often as the study allows"


def _ran(ratio: float, repeat: int) -> Any:
    """A recorded run, as if it had been FOUR and held `ratio` times what is predicted of that."""
    record = store.read_record(next((RUNS / "smoke").rglob(store.RECORD)))
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
    """A device with exactly the bytes that a run was seen to hold is the hardest case: it ran there. With half of them
    the prediction has to say that it is far out."""
    records = [store.read_record(path) for path in sorted((RUNS / folder).rglob(store.RECORD))]
    ran = [record for record in records if record.outcome.kind == "ok"]
    assert ran
    for record in ran:
        assert record.observations
        ranks = record.observations.memory
        held = max(max(rank.init_peak_bytes or 0, rank.peak_allocated_bytes or 0) for rank in ranks)
        found = forecast(record.spec, small(held), "cpu")
        assert not far_out(found, small(held)), record.config_id
        assert far_out(found, small(held / 2)), record.config_id
