"""How long the ranks of a pipeline wait for each other, by its schedule and where its model is cut: of no machine, for
a backward has twice the FLOPs of its forward on each."""

import statistics

from bench.distributed.cut import count_unit_flops
from bench.predict.engine import predict_pipeline
from bench.predict.workload import get_network
from bench.spec import RunSpec

_BACKWARD = 2
"""FLOPs over those of forward: a gradient of the inputs and one of the weights."""


def predict_idle_share(spec: RunSpec) -> float | None:
    """Return the part of a step's passes in which a rank waits, mean over ranks; None where the engine divides no
    layers among ranks. Stages take as long as their FLOPs say, transfers and the update no time. UserError for what
    the engine cannot predict."""
    costs = predict_pipeline(spec, "cpu") if spec.parallel.pipeline > 1 else None
    if costs is None:
        return None
    flops = count_unit_flops(get_network(spec), dict(spec.sequence.items()))
    forward = [float(sum(flops[part.begin : part.end])) for part in costs.parts]
    backward = [(_BACKWARD + spec.activation_checkpointing) * one for one in forward]
    end = max(costs.play(forward, backward, lambda source, target: 0.0))
    passes = [forward[stage] + backward[stage] for stage in range(len(costs.parts))]
    busy = statistics.mean(spec.accumulation * sum(passes[stage] for stage in place.stages) for place in costs.places)
    return 1 - busy / end
