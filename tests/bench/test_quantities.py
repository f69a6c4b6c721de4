"""Tests of quantities that are computed from the record of a run, compared with hand calculations."""

import math
from pathlib import Path

import pytest

from analysis.results import judge_records
from bench.core import store
from bench.core.quantities import derive_quantities
from bench.core.record import Evaluation, NodeLoad
from bench.core.record_checks import find_broken_rule

RECORD = next(iter(store.find_records([Path(__file__).parents[1] / "data/runs.zip/smoke"])))


def test_loss_of_a_training_is_that_of_its_last_evaluation() -> None:
    record = store.read_record(RECORD)
    found = derive_quantities(record)
    assert found and found.get("validation_loss") is None and found.get("step_s")
    assert record.observations
    taken = tuple(Evaluation(step=step, loss=6.0 / (step + 1), target_tokens=1, seconds=1.0) for step in (0, 1, 2))
    observed = record.observations.model_copy(update={"evaluations": taken})
    trained = derive_quantities(record.model_copy(update={"observations": observed}))
    assert trained and trained.get("validation_loss") == 2.0
    assert trained.interval("validation_loss") is None


def test_record_with_an_evaluation_after_too_many_tokens_is_invalid() -> None:
    record = store.read_record(RECORD)
    assert record.observations and find_broken_rule(record) is None
    beyond = Evaluation(step=2**60, loss=1.0, target_tokens=1, seconds=1.0)
    observed = record.observations.model_copy(update={"evaluations": (beyond,)})
    broken = find_broken_rule(record.model_copy(update={"observations": observed}))
    assert broken == "observations.evaluations: a step after more than 9007199254740992 tokens"


def test_disturbed_step_time_has_extra_noise_and_other_quantities_have_none() -> None:
    record = store.read_record(RECORD)
    observed = record.observations
    assert observed and observed.steps
    few = observed.steps.model_copy(update={"step_s": observed.steps.step_s[: observed.steps.cut + 3]})
    alike = tuple(0.1 + 0.001 * (number % 3) for number in range(60))
    sound = observed.steps.model_copy(update={"step_s": alike, "cut": 10, "steady": True})
    changed = {
        "sound": {"steps": sound, "load": None},
        "busy": {"steps": sound, "load": (NodeLoad(node=0, others_share=0.5),)},
        "few": {"steps": few, "load": None},
        "unsteady": {"steps": sound.model_copy(update={"steady": False}), "load": None},
    }
    noises = {}
    for name, update in changed.items():
        found = derive_quantities(record.model_copy(update={"observations": observed.model_copy(update=update)}))
        assert found and found.noise("peak_bytes") == found.noise("validation_loss") == 0.0
        noises[name] = found.noise("samples_per_s")
    assert noises["sound"] == 0.0
    assert noises["busy"] >= 0.3 and noises["few"] >= 0.3 and 0.1 <= noises["unsteady"] < 0.3


def test_throughputs_and_step_time_have_the_values_and_intervals_of_the_tables() -> None:
    known = 0
    for path in store.find_records([Path(__file__).parents[1] / "data/runs.zip/smoke"]):
        record = store.read_record(path)
        row, found = judge_records({"run": record}).table.iloc[0], derive_quantities(record)
        assert found
        for name in ("step_s", "tokens_per_s", "samples_per_s"):
            assert found.get(name) == pytest.approx(row[name])
        undisturbed = found._replace(step_noise=0.0)
        for name in ("step_s", "tokens_per_s"):
            ends = undisturbed.interval(name)
            shown = row[f"{name}_low"], row[f"{name}_high"]
            assert shown == pytest.approx(ends or (math.nan, math.nan), nan_ok=True)
            known += ends is not None
    assert known > 20, "most of these runs have an interval"
