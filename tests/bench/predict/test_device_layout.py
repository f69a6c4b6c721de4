"""Steps divided by tensor, pipeline and data: what must hold of any machine, and a schedule by hand."""

import dataclasses

import pytest

from bench.config import compose
from bench.errors import UserError
from bench.models.gpt.shape import Shape, stacks
from bench.predict.step_time.layout import DeviceLayout, Kernels, predict_layout_s, predict_micro_step_s, slice_network
from bench.predict.workload import Workload
from bench.stacks import count_parameters

A100 = compose.compose_request([("machine", "a100_80"), ("devices_per_node", 8)], None).machine
GPT = stacks(Shape(width=1024, layers=8, heads=16, inner=4096, vocab=51200, positions=1024))
LOAD = Workload(4, (("tokens", 1024),), 2, "eager", True, False, "cuda", False, None)
EAGER = Kernels("bf16", fused=False, update_bytes=30.0)


def predict(tensor: int = 1, pipeline: int = 1, data: int = 1, micro_batches: int = 8, load: Workload = LOAD) -> float:
    return predict_layout_s(GPT, load, DeviceLayout(tensor, pipeline, data, micro_batches), A100, EAGER)


def test_one_device_takes_its_micro_batches_and_the_update() -> None:
    micro_s = predict_micro_step_s(GPT, LOAD, 1, A100, EAGER)
    assert A100.memory_bytes_per_s
    update_s = 30.0 * count_parameters(GPT) / (0.88 * A100.memory_bytes_per_s)
    assert predict() == pytest.approx(8 * micro_s + update_s)


def test_a_device_has_its_part_of_heads_of_the_mlp_and_of_the_vocabulary() -> None:
    sliced = slice_network(GPT, DeviceLayout(4, 2, 1, 1))
    attention, mlp = sliced.stacks[0].block
    assert (attention.inner, mlp.inner, sliced.vocab, sliced.stacks[0].layers) == (256, 1024, 12800, 4)


def test_a_pipeline_waits_for_its_first_and_last_micro_batches() -> None:
    few, many = (predict(pipeline=4, micro_batches=number) / number for number in (4, 64))
    assert 1.3 < few / many < 2  # 7 passes of a stage for 4 of work, 67 for 64; the last stage's head is beside them
    assert predict(micro_batches=64) / 4 < predict(pipeline=4, micro_batches=64) < predict(micro_batches=64)


def test_more_devices_are_faster_but_never_by_more_than_their_number() -> None:
    alone = predict(micro_batches=32)
    for layout in ({"tensor": 2}, {"pipeline": 2}, {"tensor": 2, "pipeline": 2}):
        devices = 2 ** len(layout)
        assert alone / devices < predict(**layout, micro_batches=32) < alone, layout
    assert predict(data=2, micro_batches=16) > alone / 2


def test_checkpointing_costs_nothing_on_the_last_stage() -> None:
    again = LOAD._replace(checkpointing=True)
    assert predict(load=again) == pytest.approx(predict())
    assert predict(pipeline=2, load=again) > predict(pipeline=2)


def test_fused_kernels_are_faster_where_the_device_is_what_a_pass_waits_for() -> None:
    large = LOAD._replace(micro=16)
    layout, fused = DeviceLayout(1, 1, 1, 2), EAGER._replace(fused=True)
    assert predict_layout_s(GPT, large, layout, A100, fused) < predict_layout_s(GPT, large, layout, A100, EAGER)


@pytest.mark.parametrize(("layout", "said"), [
    (DeviceLayout(3, 1, 1, 1), "tensor=3: does not divide 16 heads; choose a divisor"),
    (DeviceLayout(1, 3, 1, 1), "pipeline=3: does not divide 8 layers into equal stages; choose a divisor"),
])  # fmt: skip
def test_a_layout_that_does_not_divide_the_network_is_one_line(layout: DeviceLayout, said: str) -> None:
    with pytest.raises(UserError, match=said):
        predict_layout_s(GPT, LOAD, layout, A100, EAGER)


def test_several_stacks_have_no_equal_stages() -> None:
    two = dataclasses.replace(GPT, stacks=GPT.stacks * 2)
    with pytest.raises(UserError, match="2 stacks have no equal stages"):
        slice_network(two, DeviceLayout(1, 2, 1, 1))
