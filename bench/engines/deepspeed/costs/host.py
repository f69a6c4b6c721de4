"""What one rank keeps in its node's memory in place of its device's.

Models are built on the device (bench.engines), at every stage: the host holds no copy of the weights unless they are
offloaded, or flattened there because the device cannot hold them twice. Follows DeepSpeed 0.19.8: `cpu_offload` in
stage_1_and_2.py, `offload_optimizer` and `offload_param` in stage3.py and partition_parameters.py, CPUAdam's state in
ops/adam/cpu_adam.py. Not counted: ZenFlow.
"""

from bench.engine_costs import ByteRange
from bench.engines.deepspeed.costs.buckets import count_averaged
from bench.engines.deepspeed.costs.states import find_accumulation_width
from bench.engines.deepspeed.costs.zero_run import ZeroRun
from bench.engines.deepspeed.options import OffloadOptimizer, OffloadParam
from bench.spec import FULL


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
