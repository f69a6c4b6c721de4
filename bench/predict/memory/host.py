"""Memory of a node's host: its processes, and what their engine keeps there in place of the device.

Not counted: loaders' own processes, the page cache.
"""

from typing import NamedTuple

from bench.engine_costs import ByteRange
from bench.predict.engine import predict_engine_memory, predict_pipeline
from bench.predict.memory import format_gigabytes, predict_memory
from bench.spec import Device, RunSpec

PROCESS_BYTES: dict[Device, ByteRange] = {"cpu": (400_000_000, 700_000_000), "cuda": (400_000_000, 2_700_000_000)}
"""Resident set of a rank's process beside tensors: torch, DeepSpeed and transformers. Measured here with torch's CPU
build: 0.44 to 0.60 GB after initialisation, up to 0.68 GB at the end, 74 recorded ranks. CUDA adds up to 2 GB where it
loads all kernels at once (pytorch issues 12873, 19397), and little where it loads them when they are first used."""


class HostMemory(NamedTuple):
    """What one node's host must have for all its ranks, in bytes by name, low and high."""

    terms: dict[str, ByteRange]

    @property
    def low(self) -> int:
        return sum(low for low, _ in self.terms.values())

    @property
    def high(self) -> int:
        return sum(high for _, high in self.terms.values())

    def fits(self, memory_bytes: int) -> bool | None:
        """Whether this fits into a host's memory; None where the doubt is too large to say."""
        return True if self.high <= memory_bytes else False if self.low > memory_bytes else None


def predict_host_memory(spec: RunSpec, device: Device = "cuda", room: int | None = None) -> HostMemory | None:
    """Return what each node's host needs if a device has `room` bytes; None where its engine cannot tell."""
    ranks = spec.devices_per_node
    terms = {"processes": _multiply(ranks, PROCESS_BYTES[device])}
    if device == "cpu":  # host and device are the same memory
        low, high = predict_memory(spec, device).device
        return HostMemory(terms | {"tensors": (ranks * low, ranks * high)})
    of_a_rank = {} if predict_pipeline(spec, device) else predict_engine_memory(spec, device, room).host()
    if of_a_rank is None:
        return None
    return HostMemory(terms | {name: _multiply(ranks, span) for name, span in of_a_rank.items()})


def format_host_memory(needed: HostMemory | None, ranks: int, room: int | None) -> str:
    """Return a sentence or two for a reader; `room` is the host's memory in bytes, None where it is unknown."""
    if needed is None:
        return "What a node's host needs is unknown."
    parts = ", ".join(f"{name} {_format_span(span)}" for name, span in needed.terms.items())
    text = f"A node's host needs {_format_span((needed.low, needed.high))} GB for {ranks} ranks ({parts})."
    if room is None:
        return text
    verdict = {True: "fits", False: "does not fit", None: "may fit"}[needed.fits(room)]
    return f"{text[:-1]}; it has {format_gigabytes(room)} GB: {verdict}."


def _multiply(count: int, span: ByteRange) -> ByteRange:
    return count * span[0], count * span[1]


def _format_span(span: ByteRange) -> str:
    low, high = map(format_gigabytes, span)
    return low if low == high else f"{low}–{high}"
