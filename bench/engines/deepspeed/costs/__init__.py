"""What ZeRO costs beside a pass: the memory of its states and buckets, what a step moves, and what one rank keeps in
its node's memory in place of its device's. Imports no torch.

Formulas follow what DeepSpeed 0.19.8 allocates and begins; nothing here is fitted to a measurement.

Models are built on the device (bench.engines), at every stage: the host holds no copy of the weights unless they are
offloaded, or flattened there because the device cannot hold them twice: `cpu_offload` in stage_1_and_2.py,
`offload_optimizer` and `offload_param` in stage3.py and partition_parameters.py, CPUAdam's state in
ops/adam/cpu_adam.py. Not counted: ZenFlow.
"""

from typing import NamedTuple

from bench.core.engine_costs import BackwardWork, ByteRange, EngineStep, ModelSizes, SegmentBytes, Terms
from bench.core.errors import UserError
from bench.core.spec import FULL, Device, RunSpec
from bench.engines.deepspeed.costs import states
from bench.engines.deepspeed.costs.states import count_averaged, find_accumulation_width
from bench.engines.deepspeed.costs.zero_run import ZeroRun, build_zero_run, list_transfers
from bench.engines.deepspeed.options import OffloadOptimizer, OffloadParam, Options


def predict_host(run: ZeroRun) -> dict[str, ByteRange] | None:
    """Return the bytes by name; None with NVMe, whose buffers in memory are not modelled."""
    tiers = run.options.offload_optimizer, run.options.offload_param
    if any(tier and tier.device == "nvme" for tier in tiers):
        return None
    offloaded: dict[str, ByteRange] = {}
    if run.optimizer_tier:
        offloaded |= _predict_optimizer(run, run.optimizer_tier)
    if run.weights_tier:
        offloaded |= _predict_weights(run, run.weights_tier)
    return offloaded | _predict_flattening(run, offloaded)


def _predict_flattening(run: ZeroRun, offloaded: dict[str, ByteRange]) -> dict[str, ByteRange]:
    """Where the device cannot hold the weights twice, stages 1 and 2 have them twice in the host while they are built:
    tensor by tensor and as one flat tensor. Both are freed before anything is offloaded; what they take beyond that."""
    beyond = run.width * (run.elements + run.part * run.ranks) - _sum_ranges(*offloaded.values())[1]
    if run.flattens_on_host is False or beyond <= 0:
        return {}
    return {"flattening": (beyond if run.flattens_on_host else 0, beyond)}


def _predict_optimizer(run: ZeroRun, tier: OffloadOptimizer) -> dict[str, ByteRange]:
    """What one rank offloads with its optimizer: fp32 master weights, AdamW's two moments and the fp32 gradient; stages
    1 and 2 also the updated weights on their way back and one tensor's gradient, and those of earlier micro-steps;
    stage 3 the gradients that it adds up."""
    pin, away = tier.pin_memory, run.part - run.on_device
    piece = min(run.options.sub_group_size, away) if run.stage == 3 else away
    gradient = _count_pinned_bytes(FULL * away, FULL * piece, pin)
    if run.stage == 3:
        master: ByteRange = (FULL * away,) * 2
        buffers = _count_pinned_bytes(
            find_accumulation_width(run) * run.part, find_accumulation_width(run) * run.part, pin
        )
    else:
        master = _count_pinned_bytes(FULL * away, FULL * away, pin)
        single = _count_pinned_bytes(run.width * run.largest, run.width * run.largest, pin)
        added_up = run.width * count_averaged(run) if run.accumulation > 1 else 0
        updated = _count_pinned_bytes(run.width * run.part, run.width * run.part, pin)
        buffers = _sum_ranges(updated, single, _count_pinned_bytes(added_up, run.width * run.largest, pin))
    terms = {
        "master weights": master,
        "optimizer moments": (2 * FULL * away,) * 2,
        "gradients": gradient,
        "offload buffers": buffers,
    }
    if run.optimizer.implementation == "torch":  # torch's AdamW on a CPU: a square root and a quotient
        terms["working memory"] = (2 * FULL * piece,) * 2
    return terms


def _predict_weights(run: ZeroRun, tier: OffloadParam) -> dict[str, ByteRange]:
    """Stage 3's partitions, one flat tensor; at most also what they lay in tensor by tensor before, which the pinned
    allocator keeps."""
    low, high = _count_pinned_bytes(run.width * run.part, run.width * run.part, pin=True)  # pinned whatever was asked
    parts = [(run.width * run.padded(size.elements) // run.ranks, size.number) for size in run.model.tensors]
    before = sum(_round_up_to_power_of_two(part) * number for part, number in parts)
    return {"weights": (low, high + tier.pin_memory * before)}


def _count_pinned_bytes(size: int, piece: int, pin: bool) -> ByteRange:
    """Bytes of page-locked memory for `size` bytes in pieces: torch rounds each up to a power of two (its docs on
    host_memory_stats; its issues 95823 and 150517) unless it is told not to."""
    if not pin or not size:
        return size, size
    whole, rest = divmod(size, piece)
    return size, whole * _round_up_to_power_of_two(piece) + _round_up_to_power_of_two(rest)


def _round_up_to_power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


def _sum_ranges(*spans: ByteRange) -> ByteRange:
    return sum(low for low, _ in spans), sum(high for _, high in spans)


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
        return states.predict_forward(self.run, segments)

    def backward(self, work: BackwardWork) -> SegmentBytes:
        return states.predict_backward(self.run, work)

    def after_backward(self) -> int:
        return states.count_after_backward(self.run)

    def update(self) -> Terms:
        return states.predict_update(self.run, states.count_left_gradients(self.run))

    def host(self) -> dict[str, ByteRange] | None:
        return predict_host(self.run)


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
