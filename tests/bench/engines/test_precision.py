"""Tests of loss scaling, and of the dtype in which models are built."""

import random
from typing import Any

import pytest

from bench.engines.precision import DynamicScale, LossScale
from bench.engines.precision.update import on_device

OPTIONS: list[dict[str, Any]] = [
    {},
    {"initial_scale_power": 8, "loss_scale_window": 3},
    {"initial_scale_power": 8, "loss_scale_window": 2, "hysteresis": 1},
    {"initial_scale_power": 8, "loss_scale_window": 4, "hysteresis": 3, "consecutive_hysteresis": True},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_dynamic_loss_scale_changes_like_deepspeeds(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    library = pytest.importorskip("deepspeed.runtime.fp16.loss_scaler")
    monkeypatch.setattr(library.dist, "get_rank", lambda: 1)  # DeepSpeed reads it only to log on rank 0
    ours = LossScale(**options)
    theirs = library.DynamicLossScaler(
        init_scale=2**ours.initial_scale_power,
        scale_window=ours.loss_scale_window,
        min_scale=ours.min_loss_scale,
        delayed_shift=ours.hysteresis,
        consecutive_hysteresis=ours.consecutive_hysteresis,
        raise_error_at_min_scale=False,
    )
    scale, chance = DynamicScale(ours), random.Random(0)
    for _ in range(300):
        overflow = chance.random() < 0.2
        scale.update(overflow=overflow)
        theirs.update_scale(overflow)
        assert scale.value == theirs.cur_scale


def test_fixed_loss_scale_does_not_change() -> None:
    scale = DynamicScale(LossScale(loss_scale=128))
    for overflow in (True, False, True):
        scale.update(overflow=overflow)
    assert scale.value == 128


def test_loss_scale_does_not_fall_below_its_minimum() -> None:
    scale = DynamicScale(LossScale(initial_scale_power=1, hysteresis=1, min_loss_scale=1))
    for _ in range(5):
        scale.update(overflow=True)
    assert scale.value == 1


def test_models_are_built_in_the_runs_precision() -> None:
    torch = pytest.importorskip("torch")
    with on_device("bf16"):
        assert torch.nn.Linear(2, 2).weight.dtype == torch.bfloat16
    assert torch.nn.Linear(2, 2).weight.dtype == torch.float32
