"""What ZeRO costs beside a pass: the memory of its states and buckets, and what a step moves. Imports no torch.

Formulas follow what DeepSpeed 0.19.8 allocates and begins; nothing here is fitted to a measurement.
"""

from typing import NamedTuple

from bench.engine_costs import BackwardWork, ByteRange, EngineStep, ModelSizes, SegmentBytes, Terms
from bench.engines.deepspeed.costs import buckets, host, states
from bench.engines.deepspeed.costs.transfers import list_transfers
from bench.engines.deepspeed.costs.zero_run import ZeroRun, build_zero_run
from bench.engines.deepspeed.options import Options
from bench.errors import UserError
from bench.spec import Device, RunSpec


class ZeroMemory(NamedTuple):
    """ZeRO's part of a rank's memory: an `EngineMemory`."""

    run: ZeroRun

    def resident(self) -> Terms:
        return states.predict_resident(self.run)

    def kept_buckets(self) -> int:
        return states.count_bucket_bytes(self.run) if self.run.stage == 3 else 0

    def initialisation(self, thrown_away: int) -> Terms:
        return states.predict_initialisation(self.run, thrown_away)

    def forward(self, segments: int) -> SegmentBytes:
        return buckets.predict_forward(self.run, segments)

    def backward(self, work: BackwardWork) -> SegmentBytes:
        return buckets.predict_backward(self.run, work)

    def after_backward(self) -> int:
        return buckets.count_after_backward(self.run)

    def update(self) -> Terms:
        return states.predict_update(self.run, buckets.count_left_gradients(self.run))

    def host(self) -> dict[str, ByteRange] | None:
        return host.predict_host(self.run)


def predict_memory(
    options: Options, spec: RunSpec, model: ModelSizes, device: Device, room: int | None, rehearsed: bool
) -> ZeroMemory:
    """Return ZeRO's part of a rank's memory."""
    return ZeroMemory(build_zero_run(options, spec, model, device, room, rehearsed=rehearsed))


def predict_step(options: Options, spec: RunSpec, model: ModelSizes, device: Device) -> EngineStep:
    """Return what ZeRO adds to a step; UserError for what is not predicted."""
    run = build_zero_run(options, spec, model, device)
    if options.zero_quantized_weights or options.zero_quantized_gradients:
        raise UserError("time with quantised collectives", "their bytes and kernels are not predicted", "measure it")
    if run.optimizer_tier or run.weights_tier:
        rule = "what moves between device and host, and AdamW on the host, are not predicted"
        raise UserError("time with offload", rule, "measure it")
    return EngineStep(run.part, list_transfers(run))
