"""Tests of the functions of a calibration, called in the process of the test. These functions select the operations
that can be measured within a given time, and compute results from measured times."""

import json
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bench.calibrate import SHARES, CalibrationRequest, collectives
from bench.calibrate.collectives import RankGroup, count_calls, list_groups, list_payloads, thin_out
from bench.calibrate.rates import (
    Shape,
    count_attention_flops,
    count_flops,
    create_product,
    describe_unmeasured,
    list_products,
    measure_within,
    sort_shapes,
    spread,
)
from bench.config.compose import compose_request
from bench.core.machine import Machine, MatmulRate
from bench.models import t5
from bench.models.t5 import stacks
from bench.predict.work import compute_training_flops

TINY = t5.Shape.model_validate(compose_request([("model", "tiny")]).spec.model.shape)


def test_matmul_shapes_of_a_model_are_its_weight_matrices() -> None:
    # d_model 128, heads × d_kv 6 × 32, d_ff 384, vocab 384: the head has the shape of a feed-forward's first matrix
    assert set(list_products([stacks(TINY)])) == {(128, 192), (192, 128), (128, 384), (384, 128)}
    assert list_products([stacks(TINY)] * 2) == list_products([stacks(TINY)])


def test_matmuls_of_tiny_make_up_its_training_flops() -> None:
    # one gated encoder block of 512 tokens without attention's squares: query, key, value, output, and three of d_ff
    of_block = 4 * count_flops(512, 128, 192) + 3 * count_flops(512, 128, 384)
    squares = count_attention_flops(1, 6, 512, 32)
    one, two = (stacks(TINY.model_copy(update={"encoder_layers": layers})) for layers in (1, 2))
    sample = {"encoder": 512, "decoder": 128}
    assert compute_training_flops(two, sample) - compute_training_flops(one, sample) == 3 * (of_block + squares)


def test_small_matmuls_come_first() -> None:
    sizes = [shape.flops for shape in sort_shapes(list_products([stacks(TINY)]))]
    assert sizes == sorted(sizes) and len(set(sort_shapes(list_products([stacks(TINY)])))) == len(sizes)


def test_rank_groups_grow_within_a_node_and_then_over_nodes() -> None:
    assert list_groups(1, 2) == [RankGroup(1, 1), RankGroup(1, 2)]
    assert list_groups(4, 1) == [RankGroup(1, 1), RankGroup(2, 2), RankGroup(3, 3), RankGroup(4, 4)]
    assert list_groups(2, 4) == [RankGroup(1, 1), RankGroup(1, 2), RankGroup(1, 3), RankGroup(1, 4), RankGroup(2, 8)]
    assert thin_out(20) == [1, 2, 3, 4, 8, 16, 20]


def test_payloads_are_divisible_by_the_number_of_ranks() -> None:
    assert list_payloads("cpu", 2) == [8, 64, 512, 4096, 32768, 262144, 2097152, 16777216]
    assert list_payloads("cpu", 3)[:3] == [12, 72, 516]
    assert all(size % (4 * 3) == 0 for size in list_payloads("cpu", 3))
    assert list_payloads("cpu", 16)[0] == 64 and len(list_payloads("cpu", 16)) == 7, "none twice"
    assert list_payloads("cuda", 2)[-1] == 2**30


def test_number_of_calls_follows_from_the_time_left() -> None:
    assert count_calls(1e-3, left_s=10.0, last=False) == 40, "never more than tell a median"
    assert count_calls(0.01, left_s=2.0, last=False) == 24, "an eighth of the time, the first call to warm up"
    assert count_calls(0.1, left_s=1.0, last=True) == 9, "the last has all of it"
    assert count_calls(1.0, left_s=5.0, last=False) == 3, "at least"
    assert count_calls(2.0, left_s=5.0, last=True) == 0, "four calls do not fit"


def test_slowdown_is_the_median_relative_to_one_rank_alone() -> None:
    assert collectives.compute_slowdown([[0.1, 0.1, 0.5], [0.11, 0.12, 0.13], [0.2, 0.2, 0.2]]) == pytest.approx(
        (1, 1.2, 2)
    )


def test_ranks_that_share_a_processor_are_those_of_a_node_or_of_all_nodes() -> None:
    apart = CalibrationRequest(
        machine=Machine(name="m"), device="cpu", nodes=4, ranks_per_node=2, seconds=10, parts=("contention",)
    )
    bed = apart.model_copy(update={"machine": Machine(name="bed", nodes_share_processor=True)})
    assert (collectives.count_sharers(apart), collectives.count_sharers(bed)) == (2, 8)
    assert (
        collectives.count_rounds(2, 9.0) == 10
        and collectives.count_rounds(4, 5.0) == 5
        and collectives.count_rounds(8, 1.0) == 5
    )


def test_parts_share_the_time() -> None:
    calibration = CalibrationRequest(
        machine=Machine(name="m"), device="cpu", nodes=1, ranks_per_node=2, seconds=30, parts=("collectives", "matmul")
    )
    assert sum(map(calibration.seconds_for, calibration.parts)) == pytest.approx(30)
    assert sum(SHARES.values()) == pytest.approx(1)


class Stopwatch:
    """Simulated device with a clock. A matrix product runs at 0.1 TFLOP/s and takes at least 1 ms. Each measurement of
    a product advances the clock by the time of four products."""

    def __init__(self) -> None:
        self.s = 0.0

    def time_product(self, shape: Shape) -> float:
        took = max(1e-3, shape.flops / 1e11)
        self.s += 4 * took
        return took


MANY = sort_shapes([(k, n) for k in (64, 512, 4096) for n in (64, 512, 4096, 65536)])


@pytest.mark.parametrize("seconds", [0.5, 5.0, 50.0, 500.0])
def test_shapes_of_every_size_are_measured_within_any_time(seconds: float) -> None:
    """Measuring all shapes would take 1000 s, and the largest shape alone 350 s. With the shorter limit `seconds`, only
    some shapes are measured. The choice has two rules. For every shape that takes less than 1 % of the limit, a
    measured shape must have a tenth to ten times as many FLOPs. At least one measured shape must take more than 1 % of
    the limit."""
    device = Stopwatch()
    found = measure_within(MANY, device.time_product, seconds, lambda: device.s)
    assert device.s <= seconds
    sizes = sorted(shape.flops for shape in found)
    assert sizes[-1] * 4 / 1e11 > seconds / 100, "not only the smallest"
    for shape in MANY:
        if 4 * shape.flops / 1e11 < seconds / 100:
            assert any(0.1 <= shape.flops / size <= 10 for size in sizes), shape


def test_all_shapes_are_measured_given_time_and_unmeasured_ones_are_reported() -> None:
    device = Stopwatch()
    found = measure_within(MANY, device.time_product, 1e4, lambda: device.s)
    assert found.keys() == set(MANY) and len(spread(MANY)) == len(MANY)
    rates = [MatmulRate(precision="fp32", **shape._asdict(), tflops=1) for shape in sort_shapes([(64, 64)])]
    assert describe_unmeasured([(64, 64)], ("fp32",), rates) is None
    assert describe_unmeasured([(64, 64)], ("fp32", "bf16"), rates[:9]) == (
        "6 of 15 matmul shapes in fp32, of 6.7e+07 to 1.3e+08 FLOP; "
        "15 of 15 matmul shapes in bf16, of 1e+06 to 1.3e+08 FLOP"
    )


def test_gradients_of_a_layer_are_products_of_the_calibration() -> None:
    """autograd computes the gradients of a layer of 48 × 32 weights for 64 tokens. The calibration's products have the
    same operators and operand shapes, and the same strides in memory."""
    rows, weight = torch.randn(64, 32, requires_grad=True), torch.randn(48, 32, requires_grad=True)
    seen = list[tuple[str, list[tuple[tuple[int, ...], tuple[int, ...]]]]]()

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.mm.default:
                seen.append((str(func), [(tuple(one.shape), one.stride()) for one in args]))
            return func(*args, **(kwargs or {}))

    with Products():
        made = torch.nn.functional.linear(rows, weight)
        torch.autograd.grad(made, (rows, weight), torch.randn(64, 48))
    of_layer = {json.dumps(one) for one in seen}
    seen.clear()
    for shape in (Shape(64, 32, 48), Shape(64, 48, 32, "inputs"), Shape(32, 64, 48, "weights")):
        with Products():
            create_product(shape, torch.float32, torch.device("cpu"))()
    assert len(of_layer) == 3 and {json.dumps(one) for one in seen} == of_layer


def test_first_shapes_of_the_order_are_spread_evenly() -> None:
    numbers = [(number, 1, 1) for number in range(11)]
    assert [first for first, *_ in spread(numbers)] == [0, 8, 4, 2, 10, 6, 1, 9, 5, 3, 7]
    assert spread(numbers[:1]) == numbers[:1] and spread([]) == []
