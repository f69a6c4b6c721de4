"""What ZeRO costs beside a pass: the memory of its states and buckets, and what a step moves. Imports no torch.

Formulas follow what DeepSpeed 0.19.8 allocates and begins; nothing here is fitted to a measurement.
"""

from bench.engine_costs import EngineStep, ModelSizes
from bench.engines.deepspeed.costs.transfers import transfers
from bench.engines.deepspeed.costs.zero_run import zero_run
from bench.engines.deepspeed.options import Options
from bench.errors import UserError
from bench.spec import Device, RunSpec


def step(options: Options, spec: RunSpec, model: ModelSizes, device: Device) -> EngineStep:
    """Return what ZeRO adds to a step; UserError for what is not predicted."""
    run = zero_run(options, spec, model, device)
    if options.zero_quantized_weights or options.zero_quantized_gradients:
        raise UserError("time with quantised collectives", "their bytes and kernels are not predicted", "measure it")
    if run.offloaded or run.offloads_weights:
        rule = "what moves between device and host, and AdamW on the host, are not predicted"
        raise UserError("time with offload", rule, "measure it")
    return EngineStep(run.part, transfers(run))
