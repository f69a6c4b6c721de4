"""The work of a pass, held against the closed form of its FLOPs, which equals torch's FlopCounterMode."""

import pytest

from bench import config
from bench.models import t5
from bench.predict.families import shape_of
from bench.predict.memory.segments import workload
from bench.predict.step_time import t5 as t5_work
from bench.predict.step_time.work import Matmul, Work, backward
from bench.spec import RunSpec

MODELS = ["tiny", "mt5_small", "mt5_xxl", "t5_3b", "t5_v1_1_xl"]


def spec(*overrides: str) -> RunSpec:
    return config.request(config.single(["batch.micro=3", "devices_per_node=2", *overrides]), None).spec


def flops(work: Work) -> int:
    return work.matmul_flops + work.attention_flops


@pytest.mark.parametrize("model", MODELS)
def test_a_forward_and_a_backward_pass_have_the_flops_of_the_closed_form(model: str) -> None:
    asked = spec(f"model={model}")
    shape = shape_of(asked)
    there = t5_work.forward(shape, workload(asked, "cuda"))
    assert flops(there) + flops(backward(there)) == 3 * t5.training_flops(shape, 512, 128)


@pytest.mark.parametrize("extra", [(), ("model.dropout=0.1",)], ids=["no dropout", "dropout"])
def test_what_checkpointing_computes_again_has_the_flops_of_the_closed_form(extra: tuple[str, ...]) -> None:
    asked = spec("model=mt5_base", "activation_checkpointing=true", *extra)
    shape = shape_of(asked)
    again = t5_work.recomputed(shape, workload(asked, "cuda"))
    assert flops(again) == 3 * t5.recomputed_flops(shape, 512, 128, dropout=asked.model.dropout)


def test_nothing_is_computed_again_without_checkpointing() -> None:
    asked = spec("model=mt5_base")
    assert t5_work.recomputed(shape_of(asked), workload(asked, "cuda")) == Work()


def test_backward_of_a_product_is_two_products_as_large() -> None:
    there = Work((Matmul(8, 4, 2, 3),), 10, 100, 5)
    back = backward(there)
    assert back.matmuls == (Matmul(8, 2, 4, 3), Matmul(4, 8, 2, 3))
    assert (back.matmul_flops, back.attention_flops) == (2 * there.matmul_flops, 20)
