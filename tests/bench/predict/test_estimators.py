"""Tests of DeepSpeed's memory estimators in the page on predictions. The page computes them without DeepSpeed, and must
give the results of DeepSpeed's functions."""

import itertools

import pytest
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

from analysis.validation import published_memory
from bench.config import compose
from bench.core.network import list_tensors
from bench.models import t5

PARAMETERS, LAYER = 2_851_598_337, 32_899_072


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 3), (4, 8)])
@pytest.mark.parametrize("offload", [True, False])
def test_estimate_of_stage_2_equals_deepspeeds(nodes: int, per_node: int, offload: bool) -> None:
    _, per_gpu = estimate_zero2_model_states_mem_needs(PARAMETERS, per_node, nodes, cpu_offload=offload)
    assert published_memory.estimate_zero2(PARAMETERS, nodes * per_node, offload=offload) == per_gpu


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 1), (1, 3), (4, 8)])
def test_estimate_of_stage_3_equals_deepspeeds(nodes: int, per_node: int) -> None:
    for offload, weights in itertools.product([True, False], repeat=2):
        _, per_gpu, _ = estimate_zero3_model_states_mem_needs(
            PARAMETERS, LAYER, per_node, nodes, cpu_offload=offload, cpu_offload_params=weights
        )
        ours = published_memory.estimate_zero3(
            PARAMETERS, LAYER, nodes * per_node, offload=offload, offload_weights=weights
        )
        assert ours == per_gpu


@pytest.mark.parametrize("name", ["tiny", "t5_3b", "mt5_xxl"])
def test_largest_layer_is_the_largest_matrix(name: str) -> None:
    """DeepSpeed's `model_to_params` defines the largest layer as the module that directly owns the most parameters. In
    a T5, each module that owns parameters owns a single matrix."""
    shape = compose.compose_request(
        compose.parse_single([f"model={name}", "devices_per_node=2", "launcher=slurm"])
    ).spec.model.shape
    largest = max(size.elements for size in list_tensors(t5.stacks(t5.Shape.model_validate(shape))))
    assert published_memory.count_largest_layer(shape) == largest


def test_estimate_depends_on_the_stage_and_offload_of_the_run() -> None:
    def estimate(*overrides: str) -> int | None:
        return published_memory.estimate_memory(
            compose.compose_request(compose.parse_single([*overrides, "devices_per_node=2"])).spec, 1000
        )

    assert [estimate(f"engine={engine}") for engine in ("ddp", "zero0", "zero1")] == [None] * 3
    assert estimate("engine=zero2") == 2 * 1000 + 9 * 1000
    assert (
        estimate("engine=zero2", "engine.offload_optimizer.device=cpu", "optimizer.implementation=native") == 2 * 1000
    )
    assert estimate("engine=zero3") == 4 * 128 * 384 + 9 * 1000
