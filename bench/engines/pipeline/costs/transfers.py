"""What the ranks of one place of a pipeline move between copies in a step: weights, gradients, and the norm."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from bench.engine_costs import StepPass, Transfer
from bench.engines.pipeline.costs.pipeline_run import FlatTensors, PipelineRun
from bench.machine import CollectiveKind

NORM_BYTES = 4
"""The gradient's squared norm in fp32."""


class GatheredStages(NamedTuple):
    """Whose weights are gathered in a step, by place among the rank's stages, in this order."""

    early: tuple[int, ...]  # before the rank's first backward
    late: tuple[int, ...]
    ahead: bool  # while another stage computes


def list_gathers(run: PipelineRun, flat: FlatTensors, stages: GatheredStages) -> list[Transfer]:
    """Return the gathers of weights that copies divide, and the reductions of their gradients, for which the rank
    waits. On a CPU nothing overlaps."""
    width, found = run.width, list[Transfer]()
    passes: tuple[tuple[StepPass, tuple[int, ...]], ...] = (("forward", stages.early), ("backward", stages.late))
    for when, gathered in passes:
        sizes = [width * flat.gathered[place] for place in gathered if flat.gathered[place]]
        if sizes:
            beside = stages.ahead and run.device == "cuda"
            first = sizes[0] if when == "forward" else 0
            found.append(_build(run, "all_gather", when, sum(sizes), len(sizes), beside, first))
    if reduced := [width * size for size in flat.gathered if size]:
        found.append(_build(run, "reduce_scatter", "backward", sum(reduced), len(reduced), False))
    return found


def list_reductions(run: PipelineRun, flat: FlatTensors) -> list[Transfer]:
    """Return what is moved behind the last pass: gradients of what every copy has whole, their norm over all ranks, the
    updated weights."""
    kept = [run.width * size for size in flat.kept if size]
    found = [Transfer("all_reduce", "update", NORM_BYTES, 1, 1, False, run.world_size)]
    if flat.copies > 1 and kept:
        found.append(_build(run, "reduce_scatter", "backward", sum(kept), len(kept), False))
        found.append(_build(run, "all_gather", "update", sum(kept), len(kept), False))
    return found


def list_sums(run: PipelineRun, flat: FlatTensors, sets: Sequence[Collection[int]]) -> list[Transfer]:
    """Return the sums of gradients of what ranks in several places of a pipeline have, each of the part that a copy
    updates; `sets` has the places of each of the tensors that several have."""
    apart, found = run.copies * run.tensor, list[Transfer]()
    together = min(apart, run.devices_per_node)
    for size, places in zip(flat.kept[1:], sets, strict=True):
        payload = run.width * size // flat.copies
        nodes = len({place * apart // run.devices_per_node for place in places})
        found.append(
            Transfer("all_reduce", "backward", payload, 1, 1, False, len(places), nodes=nodes, at_once=together)
        )
    return found


def list_unsliced(run: PipelineRun, elements: Sequence[int]) -> list[Transfer]:
    """Return the sums over tensor-parallel ranks of gradients of what each has whole, where each has seen some of the
    tokens: one for each flat tensor, of so many elements."""
    if not run.sequence:
        return []
    payloads = [run.width * size for size in elements if size]
    ranks = run.tensor
    return [Transfer("all_reduce", "backward", sum(payloads), len(payloads), 1, False, ranks)] if payloads else []


def _build(
    run: PipelineRun, kind: CollectiveKind, when: StepPass, payload: int, calls: int, overlaps: bool, alone: int = 0
) -> Transfer:
    """A collective of the copies of a place: every `parallel.tensor`-th of neighbouring ranks, whose other slices move
    theirs at the same time."""
    copies, tensor = run.copies, run.tensor
    nodes = min(copies, -(-copies * tensor // run.devices_per_node))
    together = min(tensor, run.devices_per_node)
    return Transfer(kind, when, payload, calls, 1, overlaps, copies, alone, nodes=nodes, at_once=together)
