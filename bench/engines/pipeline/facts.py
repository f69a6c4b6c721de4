"""Facts about the pipeline engine: its layouts, its division into stages, and the ranks that compute a loss."""

import functools
from typing import TYPE_CHECKING, Literal

from bench.core.engine_facts import EngineFacts, FrozenWeights, Rehearsal
from bench.core.errors import UserError
from bench.core.network import Part, Stacks
from bench.core.spec import Device, RunSpec
from bench.engines.distributed.cut import check_slices, count_unit_flops, cut_units
from bench.engines.pipeline.options import Options, size_of

if TYPE_CHECKING:
    from bench.core.engine_costs import PipelineCosts

SCHEDULES = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "interleaved 1F1B", "breadth_first": "breadth-first"}


def facts(spec: RunSpec) -> EngineFacts:
    """Return the facts about this engine for a spec: what it supports, and a function that predicts its costs."""
    last = spec.world_size - spec.data_parallel * spec.parallel.tensor  # the first rank with the last stages
    return EngineFacts(
        label=f"pipeline, {SCHEDULES[Options.of(spec).schedule]}",
        distinguishing=frozenset({"schedule"}),
        layouts=frozenset({"pipeline", "stages_per_rank", "tensor", "sequence"}),
        loss_ranks=tuple(range(last, spec.world_size)),
        cut=cut_into_parts,
        rehearsal=Rehearsal("any"),
        sums_norms=True,
        divides_by_tokens=True,
        frozen=FrozenWeights(why="it updates all weights of a stage as one flat tensor"),
        members=frozenset({"idle_s", "transfer_wait_s", "list_passes"}),
        pipeline=_predict_pipeline,
    )


def _predict_pipeline(spec: RunSpec, network: Stacks, device: Device, rehearsed: bool) -> "PipelineCosts":
    # imported here because it imports numpy, which other users of facts do not need
    from bench.engines.pipeline import costs

    return costs.predict_pipeline(spec, network, cut_into_parts(spec, network), device, rehearsed)


def cut_into_parts(spec: RunSpec, network: Stacks) -> tuple[Part, ...]:
    """Return the part of the model for each stage. Raise UserError if there are more stages than units (embedding,
    blocks, head)."""
    check_slices(spec, network)
    stages, units = size_of(spec).stages, 2 + sum(stack.layers for stack in network.stacks)
    if stages > units:
        value = f"parallel.pipeline={spec.parallel.pipeline} × stages_per_rank={spec.parallel.stages_per_rank}"
        rule = f"{spec.model.name} can be divided into at most {units} stages: embedding, {units - 2} blocks, head"
        raise UserError(value, rule, f"set {units} stages or less")
    return _cut_network(network, tuple(spec.sequence.items()), stages, Options.of(spec).cut)


@functools.lru_cache(maxsize=1024)  # configurations of a sweep share the result
def _cut_network(
    network: Stacks, tokens: tuple[tuple[str, int], ...], stages: int, by: Literal["flops", "blocks"]
) -> tuple[Part, ...]:
    costs = count_unit_flops(network, dict(tokens))
    if by == "blocks":
        costs = [0, *[1] * (len(costs) - 2), 0]
    return tuple(Part(units.start, units.stop, len(costs)) for units in cut_units(costs, stages))
