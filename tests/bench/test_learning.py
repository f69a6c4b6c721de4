"""Tests of learning-rate schedules and of evaluations, compared with hand calculations. Schedules are also compared
with torch's schedulers."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pydantic import ValidationError

from bench import api
from bench.config import compose
from bench.core import steps
from bench.core.errors import UserError
from bench.core.network import IGNORED
from bench.core.spec import LearningSpec, RunSpec, config_id
from bench.data import MicroBatch
from bench.engines.distributed.ranks import count_targets
from bench.measure.checkpoints import LearningProgress, SavedTraining, complete, hash_inputs
from bench.measure.loop import Series, Trainer
from bench.measure.peers import Peers
from bench.measure.training import Training
from bench.objectives import causal_lm, causal_lm_documents, span_corruption
from bench.sweep.forecast import compute_minutes

PIPELINE = ("engine=pipeline", "parallel.pipeline=2", "batch.accumulation=8")
STEP = 2 * 10
"""Number of tokens in an optimizer step."""


def spec(**chosen: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": {"name": "tiny", "family": "gpt", "shape": {}},
            "engine": {"name": "ddp", "backend": "ddp"},
            "data": {"name": "text", "source": "text"},
            "batch": {"micro": 2},
            "objective": "causal_lm",
            "sequence": {"tokens": 10},
            "optimizer": {"lr": 0.5},
            "learning": chosen,
        }
    )


def rates(asked: RunSpec) -> list[float]:
    return [steps.compute_learning_rate(asked, step) for step in range(steps.count_steps(asked))]


def torch_rates(asked: RunSpec, make: Any, steps: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=asked.optimizer.lr)
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


def test_tokens_are_rounded_up_to_whole_steps() -> None:
    assert [steps.count_steps(spec(tokens=tokens)) for tokens in (1, STEP, STEP + 1, 10 * STEP)] == [1, 1, 2, 10]


def test_constant_schedule_warms_up_linearly_and_stays() -> None:
    warm = spec(tokens=6 * STEP, warmup_tokens=4 * STEP)
    assert rates(warm) == pytest.approx([0.125, 0.25, 0.375, 0.5, 0.5, 0.5])


def test_cosine_schedule_equals_torchs() -> None:
    asked = spec(tokens=20 * STEP, schedule="cosine", final_lr=0.1)
    schedulers = torch.optim.lr_scheduler
    expected = torch_rates(asked, lambda own: schedulers.CosineAnnealingLR(own, T_max=20, eta_min=0.05), 20)
    assert rates(asked) == pytest.approx(expected)


def test_linear_schedule_after_warm_up_equals_torchs() -> None:
    asked = spec(tokens=20 * STEP, schedule="linear", warmup_tokens=5 * STEP)
    schedulers = torch.optim.lr_scheduler
    expected = torch_rates(asked, lambda own: schedulers.LinearLR(own, 1.0, 0.0, total_iters=15), 15)
    assert rates(asked) == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5, *expected])


def test_learning_rate_stays_constant_after_the_last_step() -> None:
    asked = spec(tokens=10 * STEP, schedule="cosine", final_lr=0.2)
    assert steps.compute_learning_rate(asked, 10) == steps.compute_learning_rate(asked, 99) == pytest.approx(0.1)


def test_evaluations_are_at_start_end_and_regular_intervals() -> None:
    assert list(steps.list_evaluations(spec(tokens=10 * STEP))) == [0, 10]
    assert list(steps.list_evaluations(spec(tokens=10 * STEP, evaluate_every=4 * STEP))) == [0, 4, 8, 10]
    assert list(steps.list_evaluations(spec(tokens=10 * STEP, evaluate_every=5 * STEP))) == [0, 5, 10]


def test_no_checkpoint_is_written_at_the_end_of_a_training() -> None:
    assert list(steps.list_checkpoints(spec(tokens=10 * STEP))) == []
    assert list(steps.list_checkpoints(spec(tokens=10 * STEP, checkpoint_every=5 * STEP))) == [5]
    assert list(steps.list_checkpoints(spec(tokens=10 * STEP, checkpoint_every=4 * STEP))) == [4, 8]


def test_window_of_a_training_is_the_whole_training() -> None:
    window = spec(tokens=100 * STEP).measure
    assert (window.warmup_steps, window.min_steps, window.window_s, window.gpu_warmup_s) == (10, 90, 0, 0)
    assert spec(tokens=STEP).measure.min_steps == 1


def test_checkpoint_interval_is_not_part_of_the_identity() -> None:
    assert config_id(spec(tokens=99)) == config_id(spec(tokens=99, checkpoint_every=50))
    assert config_id(spec(tokens=99)) != config_id(spec(tokens=98))
    again = RunSpec.model_validate_json(spec(tokens=99).model_dump_json(by_alias=True))
    assert config_id(again) == config_id(spec(tokens=99))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"schedule": "cosine"}, r"learning\.schedule=cosine needs learning\.tokens; set learning\.tokens"),
        ({"tokens": 9, "warmup_tokens": 9}, r"learning\.warmup_tokens=9 must be below learning\.tokens=9; lower"),
        (
            {"tokens": 9, "final_lr": 0.1},
            r"final_lr=0\.1 has no effect with learning\.schedule=constant; remove it",
        ),
    ],
)
def test_contradicting_learning_options_are_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        spec(**chosen)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            PIPELINE,
            "learning.tokens=9000: engine pipeline has no evaluate, set_learning_rate, save, load",
        ),
        (
            ("data=synthetic",),
            "data=synthetic with learning.tokens: has no held-out text to evaluate a model on",
        ),
        (("batch.micro=7",), "learning.evaluation_samples=64: not a multiple of batch.micro=7 × 2 .*; choose 70"),
    ],
)
def test_training_unsupported_by_engine_or_data_is_refused(overrides: tuple[str, ...], message: str) -> None:
    given = {"model": "gpt2_tiny", "machine": "cpu", "devices_per_node": "2", "data": "text"}
    given |= {"learning.tokens": "9000", "learning.checkpoint_every": "3000"}
    given |= dict(one.split("=", 1) for one in overrides)
    composed = compose.compose_request(compose.parse_single([f"{key}={value}" for key, value in given.items()]))
    with pytest.raises(UserError, match=message):
        compose.check(composed, "cpu")


def test_targets_exclude_labels_without_a_prediction() -> None:
    labels = torch.tensor([[5, 6, 7, IGNORED], [8, 9, IGNORED, IGNORED]])
    assert count_targets(span_corruption.KINDS, {"labels": labels}) == 5
    assert count_targets(causal_lm.KINDS, {"labels": labels}) == 3, "the first of a row is predicted from nothing"
    apart = torch.tensor([[IGNORED, 6, IGNORED, 7]])  # two documents
    assert count_targets(causal_lm_documents.KINDS, {"labels": apart}) == 2


def test_held_out_samples_without_targets_do_not_change_the_loss(tmp_path: Path) -> None:
    """Three held-out micro-batches have 3, 0 and 1 target tokens. Their mean losses are 2, NaN and 4.

    The loss of the evaluation is the mean over target tokens: (3 × 2 + 1 × 4) / 4 = 2.5.
    """
    held_out = [
        MicroBatch({"labels": torch.tensor([row])}, {})
        for row in ([9, 5, 6, 7], [9, IGNORED, IGNORED, IGNORED], [9, 5, IGNORED, IGNORED])
    ]
    losses = iter([torch.tensor(2.0), torch.tensor(float("nan")), torch.tensor(4.0)])
    engine: Any = SimpleNamespace(evaluate=lambda batches: next(losses))
    asked, single = spec(tokens=10 * STEP), SimpleNamespace(peers=Peers())
    training = Training(asked, engine, held_out, tmp_path, torch.device("cpu"), lambda phase, step: None)
    training._evaluate(cast(Trainer, single), Series(("tokens",), None))
    [found] = training.evaluations
    assert (found.loss, found.target_tokens) == (2.5, 4)


def test_queued_training_without_a_predicted_time_needs_a_time_limit() -> None:
    asked = ["model=gpt2_tiny", "machine=cpu", "devices_per_node=2", "data=text", "learning.tokens=9000"]
    asked += ["launcher=slurm", "learning.evaluation_samples=64"]
    with pytest.raises(
        UserError,
        match=r"launcher\.time_limit_min=null: no time limit can be derived for a training, .*; set the maximum",
    ):
        api.plan(None, asked)
    made = api.plan(None, [*asked, "launcher.time_limit_min=30"])
    assert [point.time_limit_min for point in made.sweep.points] == [30]
    predicted = api.plan(
        None, [*(one for one in asked if one != "machine=cpu"), "machine=a100_80", "launcher.gpus=--gres=gpu:{devices}"]
    )
    (limit_min,) = [point.time_limit_min for point in predicted.sweep.points]
    assert limit_min is not None and limit_min < 60


def test_training_resumes_only_with_the_data_and_weights_from_which_it_started(tmp_path: Path) -> None:
    """A checkpoint of a training with other inputs is refused. Inputs that an older checkpoint lacks are not
    compared."""
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "model.safetensors").write_bytes(bytes(500_000))
    before = hash_inputs({"corpus": {"sha256": "a"}}, str(weights), weights)
    assert before.keys() == {"data", "model.checkpoint"}
    (tmp_path / ".checkpoint-3").mkdir()
    complete(tmp_path, 3, LearningProgress(inputs=before))
    saved = SavedTraining(tmp_path / "checkpoint-3", 3)
    saved.check_inputs(before)
    (weights / "model.safetensors").write_bytes(bytes(499_999) + b"1")
    after = hash_inputs({"corpus": {"sha256": "b"}}, str(weights), weights)
    with pytest.raises(UserError, match=r"other contents of data and model\.checkpoint, which changed since; restore"):
        saved.check_inputs(after)
    saved.check_inputs({})


def test_evaluations_take_as_long_as_a_third_of_a_step_per_pass() -> None:
    """A training of 10 steps evaluates at steps 0, 4, 8 and 10. Each evaluation has 64 samples, which are as many
    as in 32 steps. A pass over them takes as long as 32 / 3 steps. An answer of 30 tokens needs 30 more passes."""
    asked = spec(tokens=10 * STEP, evaluate_every=4 * STEP, evaluation_samples=64)
    each = 32 / 3
    assert steps.count_evaluation_steps(asked) == pytest.approx((4 * each, 4 * each))
    answers = asked.model_copy(
        update={"learning": asked.learning.model_copy(update={"quality": ("exact_match",), "answer_tokens": 30})}
    )
    assert steps.count_evaluation_steps(answers) == pytest.approx((4 * 31 * each, 4 * 31 * each))
    assert steps.count_evaluation_steps(asked.model_copy(update={"learning": LearningSpec()})) == (0, 0)
    minutes, longer = (compute_minutes(asked.measure, 1.0, 2.0, some) for some in ((0, 0), (60, 90)))
    assert (longer.low - minutes.low, longer.high - minutes.high) == pytest.approx((1, 3))
