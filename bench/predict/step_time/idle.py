"""How long the ranks of a pipeline wait for each other, by its schedule and where its model is cut: of no machine, for
a backward has twice the FLOPs of its forward on each."""

import statistics
from collections.abc import Sequence

from bench.distributed.cut import count_unit_flops
from bench.engine_costs import PipelineCosts, PlayedPass
from bench.predict.engine import predict_pipeline
from bench.predict.workload import get_network
from bench.spec import RunSpec

_BACKWARD = 2
"""FLOPs over those of forward: a gradient of the inputs and one of the weights."""


def predict_idle_share(spec: RunSpec) -> float | None:
    """Return the part of a step's passes in which a rank waits, mean over ranks; None where the engine divides no
    layers among ranks. Stages take as long as their FLOPs say, transfers and the update no time. UserError for what
    the engine cannot predict."""
    if (costs := _find_costs(spec)) is None:
        return None
    forward, backward = _count_stage_flops(spec, costs)
    end = max(costs.play(forward, backward, _move_at_once))
    passes = [forward[stage] + backward[stage] for stage in range(len(costs.parts))]
    busy = statistics.mean(spec.accumulation * sum(passes[stage] for stage in place.stages) for place in costs.places)
    return 1 - busy / end


def play_passes_by_flops(spec: RunSpec) -> Sequence[PlayedPass]:
    """Return when each pass of such a step is made, in FLOPs of one sample in place of seconds; nothing where the
    engine divides no layers among ranks. UserError as `predict_idle_share`."""
    costs = _find_costs(spec)
    return costs.list_passes(*_count_stage_flops(spec, costs), _move_at_once) if costs else ()


def _find_costs(spec: RunSpec) -> PipelineCosts | None:
    return predict_pipeline(spec, "cpu") if spec.parallel.pipeline > 1 else None


def _count_stage_flops(spec: RunSpec, costs: PipelineCosts) -> tuple[list[float], list[float]]:
    """Return by stage those of a forward and of a backward."""
    flops = count_unit_flops(get_network(spec), dict(spec.sequence.items()))
    forward = [float(sum(flops[part.begin : part.end])) for part in costs.parts]
    return forward, [(_BACKWARD + spec.activation_checkpointing) * one for one in forward]


def _move_at_once(source: int, target: int) -> float:
    return 0.0
