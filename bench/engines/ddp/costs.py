"""What DistributedDataParallel costs beside a pass: every rank has everything, and gradients are all-reduced."""

from bench.engine_costs import EngineStep, ModelSizes, Transfer
from bench.engines.ddp.options import options_of
from bench.spec import WIDTH, Device, RunSpec

MIB = 2**20


def step(spec: RunSpec, model: ModelSizes, device: Device) -> EngineStep:
    """Return the update of all weights, and the all-reduce of their gradients while backward goes on, at the last
    micro-step; nothing is moved where the rank is alone."""
    if spec.data_parallel == 1:
        return EngineStep(model.elements, [])
    width = WIDTH[spec.precision]
    gradients, bucket = width * model.elements, options_of(spec).bucket_cap_mb * MIB
    last = width * max(size.elements for size in model.tensors)  # the embedding's gradient is complete last
    calls = max(1, round(gradients / bucket))
    reduced = Transfer("all_reduce", "backward", gradients, calls, 1, True, spec.data_parallel, last)
    return EngineStep(model.elements, [reduced])
