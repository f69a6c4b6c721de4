"""What the ranks of one place of a pipeline move between copies in a step: weights, gradients, and the norm."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from bench.engine_costs import StepPass, Transfer
from bench.machine import CollectiveKind
from bench.spec import WIDTH, Device, RunSpec

NORM_BYTES = 4
"""The gradient's squared norm in fp32."""


class FlatTensors(NamedTuple):
    """The parameters of the ranks in one place: elements of the flat tensors, with as many for each copy."""

    kept: int  # whole on every copy
    gathered: tuple[int, ...]  # by stage; 0 where nothing of it is divided
    copies: int

    @property
    def own(self) -> list[int]:
        """Elements that one rank updates, by tensor."""
        return [size // self.copies for size in (*self.gathered, self.kept) if size]


class GatheredStages(NamedTuple):
    """Whose weights are gathered in a step, by place among the rank's stages, in this order."""

    early: tuple[int, ...]  # before the rank's first backward
    late: tuple[int, ...]
    ahead: bool  # while another stage computes


def list_gathers(spec: RunSpec, flat: FlatTensors, stages: GatheredStages, device: Device) -> list[Transfer]:
    """Return the gathers of weights that copies divide, and the reductions of their gradients, for which the rank
    waits. On a CPU nothing overlaps."""
    width, found = WIDTH[spec.precision], list[Transfer]()
    passes: tuple[tuple[StepPass, tuple[int, ...]], ...] = (("forward", stages.early), ("backward", stages.late))
    for when, gathered in passes:
        sizes = [width * flat.gathered[place] for place in gathered if flat.gathered[place]]
        if sizes:
            beside = stages.ahead and device == "cuda"
            first = sizes[0] if when == "forward" else 0
            found.append(_build(spec, "all_gather", when, sum(sizes), len(sizes), beside, first))
    if reduced := [width * size for size in flat.gathered if size]:
        found.append(_build(spec, "reduce_scatter", "backward", sum(reduced), len(reduced), False))
    return found


def list_reductions(spec: RunSpec, flat: FlatTensors) -> list[Transfer]:
    """Return what is moved behind the last pass: gradients of what every copy has whole, their norm over all ranks, the
    updated weights."""
    payload = WIDTH[spec.precision] * flat.kept
    found = [Transfer("all_reduce", "update", NORM_BYTES, 1, 1, False, spec.world_size)]
    if flat.copies > 1 and payload:
        found.append(_build(spec, "reduce_scatter", "backward", payload, 1, False))
        found.append(_build(spec, "all_gather", "update", payload, 1, False))
    return found


def list_sums(spec: RunSpec, shared: Sequence[tuple[int, Collection[int]]], stages: Collection[int]) -> list[Transfer]:
    """Return the sums of gradients of what several stages have, which are on different ranks of a pipeline; `shared`
    has the elements of each, and its stages."""
    apart, found = spec.data_parallel * spec.parallel.tensor, list[Transfer]()
    for elements, holders in shared:
        places = {stage % spec.parallel.pipeline for stage in holders}
        if len(places) > 1 and not set(stages).isdisjoint(holders):
            payload = WIDTH[spec.precision] * elements // spec.parallel.tensor
            nodes = len({place * apart // spec.devices_per_node for place in places})
            together = min(apart, spec.devices_per_node)
            found.append(
                Transfer("all_reduce", "backward", payload, 1, 1, False, len(places), nodes=nodes, at_once=together)
            )
    return found


def list_unsliced(spec: RunSpec, elements: Sequence[int]) -> list[Transfer]:
    """Return the sums over tensor-parallel ranks of gradients of what each has whole, where each has seen some of the
    tokens: one for each flat tensor, of so many elements."""
    if not spec.parallel.sequence:
        return []
    payloads = [WIDTH[spec.precision] * size for size in elements if size]
    ranks = spec.parallel.tensor
    return [Transfer("all_reduce", "backward", sum(payloads), len(payloads), 1, False, ranks)] if payloads else []


def _build(
    spec: RunSpec, kind: CollectiveKind, when: StepPass, payload: int, calls: int, overlaps: bool, alone: int = 0
) -> Transfer:
    """A collective of the copies of a place: every `parallel.tensor`-th of neighbouring ranks, whose other slices move
    theirs at the same time."""
    copies, tensor = spec.data_parallel, spec.parallel.tensor
    nodes = min(copies, -(-copies * tensor // spec.devices_per_node))
    together = min(tensor, spec.devices_per_node)
    return Transfer(kind, when, payload, calls, 1, overlaps, copies, alone, nodes=nodes, at_once=together)
