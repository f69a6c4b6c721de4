"""Which layouts of a run's ranks come into question: those that its engine can do."""

from collections.abc import Iterator
from typing import NamedTuple

from bench import engines
from bench.errors import UserError
from bench.predict.workload import get_network
from bench.spec import Batch, Device, Parallel, RunSpec

STAGES = (1, 2, 4)
"""Stages on a rank that are tried where there are several ranks in a pipeline; where there is one: a stage for each
block, which is layered gradient accumulation."""
ENOUGH = 2
"""Layouts whose copies have more than so many times the ranks of the smallest that fits are not looked at, unless they
are named: they only compute in smaller portions, and wait more."""


MOST_MICRO_BATCHES = 128
"""Of a step that goes through stages: a larger micro-batch, or more copies, come to the same, and are looked at."""


class LayoutAxes(NamedTuple):
    """What is tried. None: powers of two, tensor-parallel ranks inside of a node."""

    tensor: tuple[int, ...] | None = None
    pipeline: tuple[int, ...] | None = None
    stages_per_rank: tuple[int, ...] | None = None


def list_layouts(spec: RunSpec, axes: LayoutAxes, device: Device) -> list[Parallel]:
    """Return the layouts of `spec` that its engine can do, the smallest copies first; its own alone where the engine
    knows no other."""
    able = engines.facts(spec).layouts
    if not {"tensor", "pipeline"} & able:
        return [spec.parallel]
    tensors = axes.tensor or tuple(list_doublings(spec.devices_per_node)) if "tensor" in able else (1,)
    pipelines = axes.pipeline or tuple(list_doublings(spec.world_size)) if "pipeline" in able else (1,)
    possible = [
        layout
        for tensor in tensors
        for pipeline in pipelines
        if spec.world_size % (tensor * pipeline) == 0 and (tensor > 1 or not spec.parallel.sequence)
        for layout in _list_possible(spec, tensor, pipeline, axes, device)
    ]
    return sorted(possible, key=lambda layout: layout.ranks)


def _list_possible(spec: RunSpec, tensor: int, pipeline: int, axes: LayoutAxes, device: Device) -> list[Parallel]:
    """Return those that can be of as many ranks: with one stage on each, and with as many as are tried, for more of
    them shorten the wait for others."""
    found = [
        spec.parallel.model_copy(update={"tensor": tensor, "pipeline": pipeline, "stages_per_rank": stages})
        for stages in _list_stages(spec, axes, pipeline)
    ]
    possible = [layout for layout in found if can_run(apply_layout(spec, layout), device)]
    if axes.stages_per_rank:
        return possible
    return [layout for layout in possible if layout.stages_per_rank in (1, possible[-1].stages_per_rank)]


def apply_layout(spec: RunSpec, layout: Parallel) -> RunSpec:
    """Return `spec` with a layout, and as many samples for each of its ranks as there are in a micro-batch."""
    placed = spec.model_copy(update={"parallel": layout})
    micro, accumulation = spec.batch.micro, layout.ranks
    batch = Batch(micro=micro, accumulation=accumulation, global_=micro * accumulation * placed.data_parallel)
    return placed.model_copy(update={"batch": batch})


def can_run(spec: RunSpec, device: Device) -> bool:
    """Whether nothing of an engine's rules stands against a spec."""
    plugin = engines.load(spec.engine.backend)
    try:
        plugin.check(plugin.Options.model_validate(spec.engine.options), spec, device)
        engines.check_layout(spec)
        if cut := engines.facts(spec).cut:
            cut(spec, get_network(spec))
    except UserError:
        return False
    return True


def is_worthwhile(spec: RunSpec) -> bool:
    """Whether several micro-batches go through several stages of a rank, and not more than are looked at."""
    layered = spec.parallel.stages_per_rank > 1 and spec.accumulation == 1
    return not layered and spec.accumulation <= MOST_MICRO_BATCHES


def list_doublings(largest: int) -> Iterator[int]:
    number = 1
    while number <= largest:
        yield number
        number *= 2


def _list_stages(spec: RunSpec, axes: LayoutAxes, pipeline: int) -> tuple[int, ...]:
    if axes.stages_per_rank:
        return axes.stages_per_rank
    if pipeline > 1:
        return STAGES
    blocks = sum(stack.layers for stack in get_network(spec).stacks)
    return (1, blocks) if blocks > 1 else (1,)
