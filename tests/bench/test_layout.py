"""Tests of the assignment of samples to ranks. In the tested layouts, several ranks hold parts of the same model copy,
and must get the same samples."""

from collections import Counter
from itertools import islice
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.core.engine_facts import LayoutPosition, place
from bench.core.spec import RunSpec


def spec(nodes: int, devices: int, tensor: int, pipeline: int, **fields: Any) -> RunSpec:
    plain: dict[str, Any] = {
        "model": {"name": "tiny", "shape": {"vocab": 384}},
        "engine": {"name": "ddp", "backend": "ddp"},
        "data": {"name": "synthetic", "source": "synthetic"},
        "batch": {"micro": 2},
        "sequence": {"encoder": 8, "decoder": 4},
        "nodes": nodes,
        "devices_per_node": devices,
        "parallel": {"tensor": tensor, "pipeline": pipeline},
    }
    return RunSpec.model_validate(plain | fields)


TABLE = {
    (4, 1, 1): [(0, 0, 0), (0, 1, 0), (0, 2, 0), (0, 3, 0)],
    (4, 2, 1): [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)],
    (4, 1, 2): [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)],
    (8, 2, 2): [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)],
    (6, 1, 3): [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0), (2, 0, 0), (2, 1, 0)],
}
"""Expected positions (pipeline, data, tensor) of all ranks, computed by hand. The key is (number of ranks, tensor
size, pipeline size)."""


@pytest.mark.parametrize("case", TABLE)
def test_tensor_ranks_are_innermost_and_pipeline_ranks_outermost(case: tuple[int, int, int]) -> None:
    ranks, tensor, pipeline = case
    made = spec(1, ranks, tensor, pipeline)
    assert [place(made, rank) for rank in range(ranks)] == [LayoutPosition(*row) for row in TABLE[case]]


@given(tensor=st.integers(1, 8), pipeline=st.integers(1, 8), data=st.integers(1, 8), nodes=st.integers(1, 4))
def test_every_layout_position_has_one_rank(tensor: int, pipeline: int, data: int, nodes: int) -> None:
    made = spec(nodes, tensor * pipeline * data, tensor, pipeline)
    places = [place(made, rank) for rank in range(made.world_size)]
    assert len(set(places)) == len(places)
    assert made.data_parallel == data * nodes
    assert {found.data for found in places} == set(range(made.data_parallel))
    assert set(Counter(found.data for found in places).values()) == {tensor * pipeline}
    assert max(found.tensor for found in places) == tensor - 1
    assert max(found.pipeline for found in places) == pipeline - 1


@settings(max_examples=25, deadline=None)
@given(
    tensor=st.integers(1, 3), pipeline=st.integers(1, 3), data=st.integers(1, 3), micro=st.integers(1, 3),
    accumulation=st.integers(1, 3),
)  # fmt: skip
def test_every_sample_of_a_global_batch_goes_to_one_data_parallel_rank(
    tensor: int, pipeline: int, data: int, micro: int, accumulation: int
) -> None:
    pytest.importorskip("torch")
    from bench.data.pipeline import loader

    class Indices:
        """Data stream in which all tokens of sample i have the value i."""

        padded: frozenset[str] = frozenset()

        def __call__(self, index: int) -> tuple[Any, ...]:
            import numpy as np

            return np.full(8, index), np.full(4, index)

    batch = {"micro": micro, "accumulation": accumulation}
    made = spec(1, tensor * pipeline * data, tensor, pipeline, batch=batch)
    by_rank = [
        [
            sample
            for one in islice(loader.micro_batches(Indices(), made, place(made, rank).data), accumulation)
            for sample in one.tensors["labels"][:, 0].tolist()
        ]
        for rank in range(made.world_size)
    ]
    first = {place(made, rank).data: samples for rank, samples in reversed(list(enumerate(by_rank)))}
    assert sorted(sample for samples in first.values() for sample in samples) == list(range(made.global_batch))
    assert all(samples == first[place(made, rank).data] for rank, samples in enumerate(by_rank)), "peers get the same"
