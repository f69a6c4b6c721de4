"""What a run comes to, by hand."""

from pathlib import Path

from bench import store
from bench.invariants import find_broken_rule
from bench.quantities import derive_quantities
from bench.record import Evaluation

RECORD = next(iter(store.find_records([Path(__file__).parents[1] / "data/runs/smoke"])))


def test_the_loss_of_a_training_is_that_of_its_last_evaluation() -> None:
    record = store.read_record(RECORD)
    found = derive_quantities(record)
    assert found and found.get("validation_loss") is None and found.get("step_s")
    assert record.observations
    taken = tuple(Evaluation(step=step, loss=6.0 / (step + 1), target_tokens=1, seconds=1.0) for step in (0, 1, 2))
    observed = record.observations.model_copy(update={"evaluations": taken})
    trained = derive_quantities(record.model_copy(update={"observations": observed}))
    assert trained and trained.get("validation_loss") == 2.0
    assert trained.interval("validation_loss") is None


def test_an_evaluation_behind_more_tokens_than_there_can_be_is_no_record() -> None:
    record = store.read_record(RECORD)
    assert record.observations and find_broken_rule(record) is None
    beyond = Evaluation(step=2**60, loss=1.0, target_tokens=1, seconds=1.0)
    observed = record.observations.model_copy(update={"evaluations": (beyond,)})
    broken = find_broken_rule(record.model_copy(update={"observations": observed}))
    assert broken == "observations.evaluations: behind more tokens than can be counted"
