"""Tests of the division of a model into pipeline stages. The division must minimise the cost of the most expensive
stage."""

import itertools
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from bench import models
from bench.core.network import Stacks
from bench.core.spec import ModelSpec
from bench.engines.distributed.cut import count_unit_flops, cut_units
from bench.predict.work import compute_training_flops

CONF = Path(__file__).parents[3] / "conf/model"
SAMPLES = {"encoder": 1024, "decoder": 256, "tokens": 2048}


def network_of(name: str) -> Stacks:
    plain = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    network = models.build_network(ModelSpec.model_validate(json.loads(json.dumps(plain))))
    assert network is not None
    return network


def highest_cost(costs: list[int], cut: list[range]) -> int:
    return max(sum(costs[unit] for unit in stage) for stage in cut)


def every_cut(units: int, stages: int) -> list[list[range]]:
    ends = ((0, *inner, units) for inner in itertools.combinations(range(1, units), stages - 1))
    return [[range(*pair) for pair in itertools.pairwise(cut)] for cut in ends]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.data())
def test_cut_minimises_the_cost_of_the_most_expensive_stage(costs: list[int], data: st.DataObject) -> None:
    stages = data.draw(st.integers(1, len(costs)))
    cut = cut_units(costs, stages)
    assert cut in every_cut(len(costs), stages)
    assert highest_cost(costs, cut) == min(highest_cost(costs, other) for other in every_cut(len(costs), stages))


def test_equal_blocks_are_divided_evenly() -> None:
    assert [len(stage) for stage in cut_units([1] * 12, 4)] == [3, 3, 3, 3]
    assert [len(stage) for stage in cut_units([0, *[4] * 4, 0], 3)] == [2, 2, 2]


def test_10000_units_are_cut_into_64_balanced_stages() -> None:
    cut = cut_units([0, *[1] * 10_000, 3], 64)
    assert highest_cost([0, *[1] * 10_000, 3], cut) == 157


@pytest.mark.parametrize("stages", [0, 4])
def test_impossible_numbers_of_stages_are_refused(stages: int) -> None:
    with pytest.raises(ValueError, match="3 units"):
        cut_units([1, 2, 3], stages)


@pytest.mark.parametrize("name", ["tiny", "mt5_xl", "gpt2"])
def test_flops_of_all_units_add_up_to_the_flops_of_the_model(name: str) -> None:
    network = network_of(name)
    units = count_unit_flops(network, SAMPLES)
    assert len(units) == 2 + sum(stack.layers for stack in network.stacks)
    assert 3 * sum(units) == compute_training_flops(network, SAMPLES)


@pytest.mark.parametrize(("name", "ranks", "even", "by_flops"), [
    ("mt5_xl", 2, 1.285, 1.02), ("mt5_xl", 8, 1.285, 1.08), ("mt5_xxl", 4, 1.321, 1.02), ("mt5_xxl", 8, 1.321, 1.11),
])  # fmt: skip
def test_cut_by_flops_is_more_balanced_than_a_cut_by_number_of_blocks(
    name: str, ranks: int, even: float, by_flops: float
) -> None:
    """The imbalance of a pipeline is the cost of its most expensive stage divided by the mean cost of a stage. `even`
    is the imbalance if all stages have equal numbers of blocks. `by_flops` is the largest allowed imbalance if the
    stages are chosen by FLOPs. With 1024 encoder and 256 decoder tokens, an encoder block of mT5 costs twice as much as
    a decoder block."""
    costs = count_unit_flops(network_of(name), SAMPLES)
    blocks = len(costs) - 2
    bounds = [0, *(1 + blocks * rank // ranks for rank in range(1, ranks)), len(costs)]
    equal = [range(*pair) for pair in itertools.pairwise(bounds)]
    mean = sum(costs) / ranks
    assert highest_cost(costs, equal) / mean == pytest.approx(even, abs=1e-3)
    assert highest_cost(costs, cut_units(costs, ranks)) / mean <= by_flops
