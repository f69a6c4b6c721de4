"""Which part of a run's work each of its ranks has: pipeline > data > tensor, the tensor-parallel ranks next to each
other, so that they share a node."""

from typing import NamedTuple

from bench.spec import RunSpec


class LayoutPosition(NamedTuple):
    """A rank's place in the layout, each from 0."""

    pipeline: int  # which part of the layers
    data: int  # which samples: the ranks of one data-parallel rank get the same
    tensor: int  # which slice of each matrix


def place(spec: RunSpec, rank: int) -> LayoutPosition:
    """Return the place of `rank`, which is below `spec.world_size`."""
    others, tensor = divmod(rank, spec.parallel.tensor)
    pipeline, data = divmod(others, spec.data_parallel)
    return LayoutPosition(pipeline, data, tensor)


def find_rank(spec: RunSpec, here: LayoutPosition) -> int:
    """Return the rank in a place."""
    return (here.pipeline * spec.data_parallel + here.data) * spec.parallel.tensor + here.tensor


def list_stages(spec: RunSpec, rank: int) -> range:
    """Return the numbers of a rank's stages, in the order of forward: stage s is on rank s mod `pipeline` of a copy."""
    parallel = spec.parallel
    return range(place(spec, rank).pipeline, parallel.pipeline * parallel.stages_per_rank, parallel.pipeline)
