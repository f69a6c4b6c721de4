"""Predicted memory of one rank, by phase (such as forward) and term (such as activations). Also the largest micro-batch
that fits, and the host memory of a node.

Tensor bytes follow from the allocations of torch and transformers and from the facts that each engine declares. Nothing
here is fitted to a measurement. Other memory of a process is a named constant below with a low and a high value; their
difference is the uncertainty. Host memory includes the processes of the ranks and the states that the engine keeps on
the host. It excludes the processes of data loaders and the page cache.
"""

import functools
import itertools
from typing import NamedTuple

import numpy as np

from bench.core.engine_costs import (
    CUDA_BASE_BYTES,
    Array,
    BackwardWork,
    ByteRange,
    EngineMemory,
    SegmentBytes,
    Terms,
    sum_bytes,
)
from bench.core.errors import UserError
from bench.core.formatting import format_count
from bench.core.network import Stacks
from bench.core.spec import WIDTH, Device, RunSpec
from bench.predict.memory.activations import Segment, list_segments
from bench.predict.memory.stages import list_place_phases
from bench.predict.workload import (
    Workload,
    build_workload,
    get_network,
    predict_engine_memory,
    predict_pipeline,
    with_batch,
)

FRAGMENTATION = (0.0, 0.16)
"""Bytes that torch's caching allocator needs beyond live tensors, low and high, as a share of the temporary tensors'
bytes. The low value, 0, is the best case. The high value has two reasons. Blocks of at least 10 MiB are rounded up to a
multiple of 2 MiB. A freed block does not always fit the next tensor.

The high value is the largest of 12 rehearsals on an imitated allocator (`inputs/rehearsed_h200.csv`: 0.01 to 0.16),
whose memory was reduced until it failed. The share is (least_reserved_bytes - predicted peak) / (predicted peak -
predicted resident bytes), so that it contains the unused parts of blocks. With enough memory, the allocator reserves
more: 0.06 to 0.59 in the real runs."""
LARGEST_MICRO_BATCH = 2**16
"""No larger micro-batch is tried."""
PROCESS_BYTES: dict[Device, ByteRange] = {"cpu": (400_000_000, 700_000_000), "cuda": (400_000_000, 2_700_000_000)}
"""Resident bytes of a rank's process without tensors, low and high, by kind of device. The process has loaded torch,
DeepSpeed and transformers.

Measured with torch's CPU build on 74 recorded ranks: 0.44 to 0.60 GB after initialisation, up to 0.68 GB at the end.
CUDA adds up to 2 GB if it loads all kernels at once (pytorch issues 12873, 19397). It adds little if it loads each
kernel at its first use.
"""


def _compare_with_room(low: int, high: int, room: int) -> bool | None:
    return True if high <= room else False if low > room else None


class MemoryPhase(NamedTuple):
    """Bytes at the peak of one phase of a run, such as `forward`, by term (kind of memory, such as activations)."""

    name: str
    terms: Terms

    @property
    def total(self) -> int:
        return sum_bytes(self.terms)


class MemoryPrediction(NamedTuple):
    """Predicted memory of one rank, in bytes."""

    phases: tuple[MemoryPhase, ...]
    resident: int  # bytes of live tensors between two steps
    base: tuple[int, int]  # bytes of the process without tensors, low and high
    reserve: tuple[int, int]  # bytes that the allocator reserves beyond tensors, low and high

    def __repr__(self) -> str:
        phases = ", ".join(f"{phase.name} {format_gigabytes(phase.total)}" for phase in self.phases)
        span = "–".join(dict.fromkeys(map(format_gigabytes, self.device)))
        return f"<MemoryPrediction: a device needs {span} GB; tensors by phase: {phases} GB>"

    @property
    def init_peak(self) -> int:
        """Bytes of live tensors at the peak of building the model and the engine."""
        return self.phases[0].total

    @property
    def peak(self) -> int:
        """Largest number of bytes of live tensors at any time within a step. The number applies to every step after the
        first."""
        return max(phase.total for phase in self.phases[1:])

    @property
    def device(self) -> tuple[int, int]:
        """Bytes of memory that the device must have, low and high."""
        highest = max(self.init_peak, self.peak)
        low, high = (highest + base + reserve for base, reserve in zip(self.base, self.reserve, strict=True))
        return low, high

    def fits(self, memory_bytes: int) -> bool | None:
        """Return True if the rank surely fits into `memory_bytes` of device memory and False if it surely does not;
        None if the prediction is too uncertain to decide."""
        return _compare_with_room(*self.device, memory_bytes)


class LargestMicroBatch(NamedTuple):
    """Largest micro-batch in samples that surely fits, and largest that may fit; 0 if one sample does not fit."""

    surely: int
    perhaps: int


def predict_memory(
    spec: RunSpec, device: Device = "cuda", room: int | None = None, *, rehearsed: bool = False
) -> MemoryPrediction:
    """Return the predicted memory of the rank that needs the most memory. `room` is the memory of a device in bytes.
    `rehearsed` is true for a rehearsal, in which one rank runs alone and collectives are only simulated.

    Raise NoPrediction for a model family that does not describe its network, or for an engine that cannot predict its
    memory. Raise UserError for sizes that overflow.
    """
    try:
        if places := predict_memory_by_place(spec, device, rehearsed=rehearsed):
            return max(places, key=lambda place: place.device[1])
        network = get_network(spec)
        engine = predict_engine_memory(spec, device, room, rehearsed=rehearsed)
        buckets = {"buckets": engine.kept_buckets()}
        segments = _stack_segments(network, build_workload(spec, device))
        phases = (
            MemoryPhase("initialisation", engine.initialisation(network.discarded)),
            *_find_pass_peaks(engine, WIDTH[spec.precision], segments),
            MemoryPhase("update", engine.update() | buckets),
        )
        return _add_process(phases, sum_bytes(engine.resident() | buckets), device)
    except OverflowError as error:
        point = f"{spec.model.name} {spec.engine.name} micro {spec.batch.micro}"
        raise UserError(point, "more bytes than can be counted", "look for a number that is far too large") from error


def predict_memory_by_place(
    spec: RunSpec, device: Device = "cuda", *, rehearsed: bool = False
) -> tuple[MemoryPrediction, ...]:
    """Return the predicted memory of the ranks at each position of a pipeline. Position s has the stages s, s +
    `parallel.pipeline`, and so on.

    Empty if every rank holds the whole model. Raise the errors of `predict_memory`.
    """
    costs = predict_pipeline(spec, device, rehearsed=rehearsed)
    if costs is None:
        return ()
    of_places = list_place_phases(spec, get_network(spec), build_workload(spec, device), costs)
    return tuple(
        _add_process(tuple(itertools.starmap(MemoryPhase, phases.items())), sum_bytes(place.resident), device)
        for phases, place in zip(of_places, costs.places, strict=True)
    )


def _add_process(phases: tuple[MemoryPhase, ...], lasting: int, device: Device) -> MemoryPrediction:
    """Return the prediction of a rank whose tensors have these phases. The memory of the rank's process, and the bytes
    that the allocator reserves beyond tensors, are added. `lasting` is the number of bytes of tensors that live between
    steps."""
    highest = max(phase.total for phase in phases)
    coming = max(0, highest - lasting)
    base = CUDA_BASE_BYTES if device == "cuda" else (0, 0)
    # memory that is never freed is not fragmented
    low, high = (int(share * coming) if device == "cuda" else 0 for share in FRAGMENTATION)
    return MemoryPrediction(phases, lasting, base, (low, high))


@functools.lru_cache(maxsize=1024)  # points of a sweep that differ in engine or ranks share it
def _stack_segments(network: Stacks, load: Workload) -> Array:
    """Return the fields of the network's `Segment` tuples, such as the bytes saved for backward, as an array of shape
    (fields, segments). The segments are in the order of the forward pass."""
    distinct: list[Segment] = []
    order: list[int] = []
    for block, times in list_segments(network, load):
        order += list(range(len(distinct), len(distinct) + len(block))) * times
        distinct += block
    return np.array(distinct, np.int64)[order].T


def _find_pass_peaks(engine: EngineMemory, width: int, segments: Array) -> tuple[MemoryPhase, MemoryPhase]:
    """Return the phases `forward` and `backward` of the last micro-step, each at its point of highest memory. This
    point is within a segment (part of a pass, such as a sub-layer) or after the last segment. `width` is the bytes per
    element of weights. `segments` has a row for each field of `Segment` and a column for each segment, in forward
    order."""
    # each of shape (segments,)
    saved, running, backing, parameters, largest, carried, transposed, standing, logits = segments
    kept, resident_terms = np.cumsum(saved), engine.resident()
    own_gradients = resident_terms.get("gradients", 0)

    def build_phase(name: str, working: Array, engine_bytes: SegmentBytes, at_end: int = 0) -> MemoryPhase:
        gradients = engine_bytes.gradients
        at = int(np.argmax(kept + working + gradients + engine_bytes.buckets + engine_bytes.gathered))
        wide = int(logits[at])  # 1 if the segment has tensors as wide as the vocabulary
        last = int((saved * logits)[: at + 1].sum())
        terms = resident_terms | {
            "gradients": own_gradients + int(gradients[at]),
            "buckets": int(engine_bytes.buckets[at]),
            "gathered layers": int(engine_bytes.gathered[at]),
            "activations": int(kept[at]) - last,
            "logits and loss": last + wide * int(working[at]),
            "working memory": (1 - wide) * int(working[at]),
        }
        # after the last segment only gradients and `at_end` bytes of buckets remain, which may be the peak
        ended = resident_terms | {"gradients": own_gradients + int(gradients[0]), "buckets": at_end}
        return max(MemoryPhase(name, terms), MemoryPhase(name, ended), key=lambda phase: phase.total)

    backward = engine.backward(BackwardWork(backing, standing, parameters, largest, transposed))
    waiting = width * np.cumsum(carried[::-1])[::-1]  # gradients that are not complete before the end of backward
    backward = backward._replace(gradients=waiting + backward.gradients)
    return (
        build_phase("forward", running, engine.forward(len(saved))),
        build_phase("backward", backing, backward, engine.after_backward()),
    )


def find_largest_micro_batch(spec: RunSpec, memory_bytes: int, device: Device = "cuda") -> LargestMicroBatch:
    """Return two micro-batches: the largest with which `spec` surely fits into `memory_bytes` per device, and the
    largest with which `spec` may fit. All other settings stay as they are, so the global batch grows with the
    micro-batch."""

    def fits(micro: int, end: int) -> bool:
        other = with_batch(spec, micro, spec.accumulation)
        return predict_memory(other, device, memory_bytes).device[end] <= memory_bytes

    # memory grows with the micro-batch, so doubling and then bisection finds the boundary
    def find_largest(end: int) -> int:
        low, high = 0, 1
        while fits(high, end):
            low, high = high, 2 * high
            if low >= LARGEST_MICRO_BATCH:
                return low
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle, end) else (low, middle)
        return low

    return LargestMicroBatch(surely=find_largest(1), perhaps=find_largest(0))


def format_gigabytes(size_bytes: float) -> str:
    """Return a number of bytes as text in units of 10^9, with three significant digits. Values from 1,000 GB have no
    decimals."""
    return f"{size_bytes / 1e9:.3g}" if size_bytes < 1e12 else f"{size_bytes / 1e9:,.0f}"


class HostMemory(NamedTuple):
    """Host memory that all ranks of one node need: low and high bytes of each term (such as processes)."""

    terms: dict[str, ByteRange]

    @property
    def low(self) -> int:
        return sum(low for low, _ in self.terms.values())

    @property
    def high(self) -> int:
        return sum(high for _, high in self.terms.values())

    def fits(self, memory_bytes: int) -> bool | None:
        """Return True if the ranks surely fit into `memory_bytes` of host memory and False if they surely do not; None
        if the prediction is too uncertain to decide."""
        return _compare_with_room(self.low, self.high, memory_bytes)


def predict_host_memory(spec: RunSpec, device: Device = "cuda", room: int | None = None) -> HostMemory | None:
    """Return the host memory that each node needs; None if the engine cannot predict it. If the device is the CPU, host
    memory includes the tensors of the ranks. `room` is the memory of a device in bytes."""
    if device == "cpu":  # host and device are the same memory
        of_a_rank: dict[str, ByteRange] | None = {"tensors": predict_memory(spec, device).device}
    else:
        of_a_rank = {} if predict_pipeline(spec, device) else predict_engine_memory(spec, device, room).host()
    if of_a_rank is None:
        return None
    ranks, terms = spec.devices_per_node, {"processes": PROCESS_BYTES[device], **of_a_rank}
    return HostMemory({name: (ranks * low, ranks * high) for name, (low, high) in terms.items()})


def format_host_memory(needed: HostMemory | None, ranks: int, room: int | None) -> str:
    """Return a sentence on the host memory that a node needs. `room` is the host's memory in bytes; None if it is
    unknown."""
    if needed is None:
        return "The host memory of a node is unknown."

    def span(low: int, high: int) -> str:
        return "–".join(dict.fromkeys(map(format_gigabytes, (low, high))))

    parts = ", ".join(f"{name} {span(*bounds)}" for name, bounds in needed.terms.items())
    text = f"A node's host needs {span(needed.low, needed.high)} GB for {format_count(ranks, 'rank')} ({parts})"
    if room is None:
        return f"{text}."
    verdict = {True: "fits", False: "does not fit", None: "may fit"}[needed.fits(room)]
    return f"{text}; it has {format_gigabytes(room)} GB: {verdict}."
