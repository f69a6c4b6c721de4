"""Memory of a node's host: its processes, and what DeepSpeed keeps there in place of the device.

Models are built on the device (bench.engines), at every stage: the host holds no copy of the weights unless they are
offloaded, or flattened there because the device cannot hold them twice. Follows DeepSpeed 0.19.8: `cpu_offload` in
stage_1_and_2.py, `offload_optimizer` and `offload_param` in stage3.py and partition_parameters.py, CPUAdam's state in
ops/adam/cpu_adam.py. Not counted: loaders' own processes, the page cache, ZenFlow.
"""

from typing import NamedTuple

from bench.predict.memory import gigabytes, memory
from bench.predict.memory.buckets import averaged
from bench.predict.memory.engines import Engine, engine
from bench.predict.memory.states import accumulation_width, sub_group
from bench.predict.workload import network_of
from bench.spec import FULL, Device, RunSpec
from bench.stacks import tensors

Span = tuple[int, int]
"""Bytes, low and high."""

PROCESS_BYTES: dict[Device, Span] = {"cpu": (400_000_000, 700_000_000), "cuda": (400_000_000, 2_700_000_000)}
"""Resident set of a rank's process beside tensors: torch, DeepSpeed and transformers. Measured here with torch's CPU
build: 0.44 to 0.60 GB after initialisation, up to 0.68 GB at the end, 74 recorded ranks. CUDA adds up to 2 GB where it
loads all kernels at once (pytorch issues 12873, 19397), and little where it loads them when they are first used."""


class Host(NamedTuple):
    """What one node's host must have for all its ranks, in bytes by name, low and high."""

    terms: dict[str, Span]

    @property
    def low(self) -> int:
        return sum(low for low, _ in self.terms.values())

    @property
    def high(self) -> int:
        return sum(high for _, high in self.terms.values())

    def fits(self, memory_bytes: int) -> bool | None:
        """Whether this fits into a host's memory; None where the doubt is too large to say."""
        return True if self.high <= memory_bytes else False if self.low > memory_bytes else None


def host(spec: RunSpec, device: Device = "cuda", room: int | None = None) -> Host | None:
    """Return what each node's host needs if a device has `room` bytes; None with NVMe, whose buffers in memory are not
    modelled."""
    ranks = spec.devices_per_node
    terms = {"processes": _times(ranks, PROCESS_BYTES[device])}
    if device == "cpu":  # host and device are the same memory
        low, high = memory(spec, device).device
        return Host(terms | {"tensors": (ranks * low, ranks * high)})
    held = engine(spec, tensors(network_of(spec)), device, room)
    if "nvme" in _tiers(held):
        return None
    offloaded = (_optimizer(held) if held.offloads else {}) | (_weights(held) if held.offloads_weights else {})
    of_a_rank = offloaded | _flattening(held, offloaded)
    return Host(terms | {name: _times(ranks, span) for name, span in of_a_rank.items()})


def told(needed: Host | None, ranks: int, room: int | None) -> str:
    """Return a sentence or two for a reader; `room` is the host's memory in bytes, None where it is unknown."""
    if needed is None:
        return "What a node's host needs with NVMe is unknown."
    parts = ", ".join(f"{name} {_span(span)}" for name, span in needed.terms.items())
    text = f"A node's host needs {_span((needed.low, needed.high))} GB for {ranks} ranks ({parts})."
    if room is None:
        return text
    verdict = {True: "fits", False: "does not fit", None: "may fit"}[needed.fits(room)]
    return f"{text[:-1]}; it has {gigabytes(room)} GB: {verdict}."


def _tiers(e: Engine) -> set[str]:
    o = e.options
    return {tier.device for tier in (o.offload_optimizer, o.offload_param) if tier} if o else set()


def _flattening(e: Engine, offloaded: dict[str, Span]) -> dict[str, Span]:
    """Where the device cannot hold the weights twice, stages 1 and 2 have them twice in the host while they are built:
    tensor by tensor and as one flat tensor. Both are freed before anything is offloaded; what they take beyond that."""
    beyond = e.width * (e.elements + e.part * e.ranks) - _sum(*offloaded.values())[1]
    if e.flattens_on_host is False or beyond <= 0:
        return {}
    return {"flattening": (beyond if e.flattens_on_host else 0, beyond)}


def _optimizer(e: Engine) -> dict[str, Span]:
    """What one rank offloads with its optimizer: fp32 master weights, AdamW's two moments and the fp32 gradient; stages
    1 and 2 also the updated weights on their way back and one tensor's gradient, and those of earlier micro-steps;
    stage 3 the gradients that it adds up."""
    assert e.options is not None
    assert e.options.offload_optimizer is not None
    pin, away = e.options.offload_optimizer.pin_memory, e.part - e.on_device
    piece = min(sub_group(e), away) if e.stage == 3 else away
    gradient = _pinned(FULL * away, FULL * piece, pin)
    if e.stage == 3:
        master: Span = (FULL * away,) * 2
        buffers = _pinned(accumulation_width(e) * e.part, accumulation_width(e) * e.part, pin)
    else:
        master = _pinned(FULL * away, FULL * away, pin)
        single = _pinned(e.width * e.largest, e.width * e.largest, pin)
        added_up = e.width * averaged(e) if e.accumulating else 0
        updated = _pinned(e.width * e.part, e.width * e.part, pin)
        buffers = _sum(updated, single, _pinned(added_up, e.width * e.largest, pin))
    terms = {
        "master weights": master,
        "optimizer moments": (2 * FULL * away,) * 2,
        "gradients": gradient,
        "offload buffers": buffers,
    }
    if e.optimizer.implementation == "torch":  # torch's AdamW on a CPU: a square root and a quotient
        terms["working memory"] = (2 * FULL * piece,) * 2
    return terms


def _weights(e: Engine) -> dict[str, Span]:
    """Stage 3's partitions, one flat tensor; at most also what they lay in tensor by tensor before, which the pinned
    allocator keeps."""
    assert e.options is not None
    assert e.options.offload_param is not None
    pin = e.options.offload_param.pin_memory
    low, high = _pinned(e.width * e.part, e.width * e.part, pin=True)  # pinned whatever was asked
    parts = [(e.width * e.padded(size.elements) // e.ranks, size.number) for size in e.sizes]
    return {"weights": (low, high + pin * sum(_power_of_two(part) * number for part, number in parts))}


def _pinned(size: int, piece: int, pin: bool) -> Span:
    """Bytes of page-locked memory for `size` bytes in pieces: torch rounds each up to a power of two (its docs on
    host_memory_stats; its issues 95823 and 150517) unless it is told not to."""
    if not pin or not size:
        return size, size
    whole, rest = divmod(size, piece)
    return size, whole * _power_of_two(piece) + _power_of_two(rest)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length() if size else 0


def _times(count: int, span: Span) -> Span:
    return count * span[0], count * span[1]


def _sum(*spans: Span) -> Span:
    return sum(low for low, _ in spans), sum(high for _, high in spans)


def _span(span: Span) -> str:
    low, high = map(gigabytes, span)
    return low if low == high else f"{low}–{high}"
