"""The loss of a step divided by its target tokens is that of all its samples at once, however they are divided."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed

from bench.distributed.targets import weigh
from bench.engines.ddp.engine import build as build_ddp
from bench.models.t5 import build as t5
from bench.spec import RunSpec, config_id

SAMPLES = 8
OPTIONS = {"bucket_cap_mb": 25, "gradient_as_bucket_view": True, "static_graph": False}


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """This process is a group of one rank."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def spec(micro: int, **more: Any) -> RunSpec:
    shape = {"d_model": 32, "d_kv": 8, "d_ff": 64, "encoder_layers": 2, "decoder_layers": 2, "heads": 4, "vocab": 128,
             "gated": True, "activation": "gelu_new", "separate_head": True}  # fmt: skip
    return RunSpec.model_validate({
        "model": {"name": "test", "shape": shape}, "engine": {"name": "ddp", "backend": "ddp", "options": OPTIONS},
        "data": {"name": "test", "source": "test"}, "batch": {"micro": micro, "accumulation": SAMPLES // micro},
        "sequence": {"encoder": 12, "decoder": 6}, "precision": "fp32",
        "optimizer": {"lr": 1e-3, "gradient_clipping": 0.5}, **more,
    })  # fmt: skip


def micro_batches(of: RunSpec, step: int, *, padded: bool = True) -> list[dict[str, torch.Tensor]]:
    """Samples with 1 to 6 target tokens, the same for every micro-batch size."""
    generator = torch.Generator().manual_seed(step)
    inputs, labels = (torch.randint(2, 128, (SAMPLES, length), generator=generator) for length in (12, 6))
    for sample in range(SAMPLES if padded else 0):
        labels[sample, 1 + (5 * sample) % 6 :] = -100
    parts = zip(inputs.split(of.batch.micro), labels.split(of.batch.micro), strict=True)
    return [{"input_ids": one, "labels": other} for one, other in parts]


def train(of: RunSpec, *, padded: bool = True) -> list[float]:
    """Losses and gradient norms of three steps."""
    module = t5.build(of)
    t5.initialise(module, of)
    engine, found = build_ddp(module, of), list[float]()
    for step in range(3):
        found.append(float(engine.train_step(micro_batches(of, step, padded=padded))))
        norm = engine.gradient_norm()
        assert norm is not None
        found.append(float(norm))
    return found


@pytest.mark.parametrize("micro", [1, 2, 4])
def test_losses_and_norms_do_not_depend_on_micro_batches(micro: int) -> None:
    whole = train(spec(SAMPLES))  # in one micro-batch, torch's own mean over all target tokens
    assert train(spec(micro, loss_mean="tokens")) == pytest.approx(whole, rel=2e-6)
    assert train(spec(micro)) != pytest.approx(whole, rel=1e-3), "a mean of means is another step"


def test_with_as_many_targets_everywhere_both_means_are_the_same_to_rounding() -> None:
    plain = train(spec(2), padded=False)
    assert train(spec(2, loss_mean="tokens"), padded=False) == pytest.approx(plain, rel=2e-6)


def test_a_mean_of_micro_batches_takes_none_ahead() -> None:
    taken = iter(micro_batches(spec(1), 0))
    next(weigh(taken, spec(1)))
    assert len(list(taken)) == SAMPLES - 1


def test_it_is_part_of_the_identity_and_what_earlier_runs_had_is_left_out() -> None:
    usual, tokens = spec(2), spec(2, loss_mean="tokens")
    assert "loss_mean" not in usual.model_dump() and tokens.model_dump()["loss_mean"] == "tokens"
    assert config_id(usual) == config_id(spec(2, loss_mean="micro_batches")) != config_id(tokens)
