"""Description of a machine: the properties of one node type, with the source of each number.

None means that a number is unknown. No number is derived from a machine's name.
"""

from typing import Annotated, Literal, NamedTuple

from pydantic import BeforeValidator, Field

from bench.core.errors import UserError
from bench.core.spec import Frozen, Name, Positive, Precision

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter"]


class MatmulRate(Frozen):
    """Measured rate of one matrix product, m × k times k × n: the median of many calls."""

    precision: Precision
    m: Positive
    k: Positive
    n: Positive
    tflops: float = Field(gt=0)


class CollectiveTime(Frozen):
    """Measured seconds of one collective with fp32 elements: the median over calls of the slowest rank's time.

    The payload is counted as in nccl-tests: the reduced tensor, the gathered output, or the input of a scatter.
    """

    kind: CollectiveKind
    nodes: Positive
    ranks: Positive = Field(description="number of ranks of the collective")
    payload_bytes: Positive
    s: float = Field(gt=0)


def _parse_rows(given: object) -> object:
    # A table of words with a header line: composing hundreds of mappings with Hydra is slow.
    if not isinstance(given, str):
        return given
    names, *rows = [line.split() for line in given.splitlines()] or [[]]
    return [dict(zip(names, row, strict=True)) for row in rows]


Table = BeforeValidator(_parse_rows)


class Calibration(Frozen):
    """Measurements of a machine by `zeroscale calibrate`. Measurements that were not made are empty or None."""

    made: dict[str, str | None] = Field({}, description="date, device, versions")
    matmul: Annotated[tuple[MatmulRate, ...], Table] = ()
    attention_tflops: dict[Precision, float] = Field(
        {}, description="rate of T5's attention with its position bias in forward"
    )
    kernel_s: float | None = Field(None, gt=0, description="host's seconds to start one operation")
    slowdown: tuple[float, ...] = Field(
        (), description="compute time with 1, 2, … ranks on one processor, relative to one rank"
    )
    collectives: Annotated[tuple[CollectiveTime, ...], Table] = ()


class Machine(Frozen):
    """A node type of `conf/machine`. Peak rates are per device, without sparsity, in TFLOP/s."""

    name: Name
    device: str | None = Field(None, description='"cpu" or "cuda"; None: whichever is present')
    device_names: tuple[str, ...] = Field((), description="accepted device names; empty: any")
    devices_per_node: Positive | None = None
    peak_tflops: dict[Precision, float] = {}
    unsupported: tuple[Precision, ...] = ()
    matmul_ceiling_tflops: dict[Precision, float] = Field(
        {}, description="highest rate of matrix products in short bursts, which is below the peak"
    )
    sustained_tflops: dict[Precision, float] = Field(
        {}, description="rate of large matrix products during a long training"
    )
    attention_of_matmul: float | None = Field(
        None, gt=0, le=1, description="rate of attention divided by the rate of matrix products"
    )
    multiprocessors: Positive | None = Field(
        None, description="number of multiprocessors per device: NVIDIA's SMs, AMD's compute units"
    )
    memory_bytes: Positive | None = Field(
        None, description="memory of a device as its driver reports it: 42.5e9 for a 40 GB card"
    )
    memory_bytes_per_s: float | None = Field(None, gt=0)
    intra_node_bytes_per_s: float | None = Field(
        None, gt=0, description="bandwidth between devices of a node, in one direction, per device"
    )
    inter_node_bytes_per_s: float | None = Field(
        None, gt=0, description="bandwidth between nodes, in one direction, per node over all its network cards"
    )
    inter_node_floor_bytes_per_s: float | None = Field(
        None,
        gt=0,
        description="minimum measured bandwidth between two ranks, in one direction; a run below it is `invalid`",
    )
    nodes_share_processor: bool = Field(
        False, description="True: the nodes are namespaces of one machine, as in slurm/testbed"
    )
    power_w: float | None = Field(None, gt=0, description="power limit of a device's board")
    host_memory_bytes: Positive | None = Field(None, description="memory of a node's host")
    host_link_bytes_per_s: float | None = Field(
        None, gt=0, description="bandwidth between a device and its host, in one direction"
    )
    calibration: Calibration | None = Field(None, description="measured rates of this machine; not stored in records")
    price_per_device_hour: float | None = Field(
        None, gt=0, description="price of a device for an hour, in any currency"
    )
    source: str = ""
    calibrated: dict[str, str] = Field(
        {}, description="fields that `zeroscale calibrate` has measured, with the published number of each"
    )
    note: str = ""

    def on(self, device: str | None) -> "Machine":
        """Return a copy of this machine for the record: with the kind of device that the run uses, without the
        calibration tables."""
        return self.model_copy(update={"device": device, "calibration": None})

    def accepts(self, device_name: str) -> bool:
        """Return True if the name of a device matches this machine's device, ignoring case."""
        return not self.device_names or device_name.lower() in map(str.lower, self.device_names)


class _PlausibleRange(NamedTuple):
    """Bounds of a field that are plausible for any machine, and the remedy for a value outside them."""

    low: float
    high: float
    remedy: str


_TFLOPS = _PlausibleRange(1e-4, 1e5, "give 10^12 FLOP/s, for example 312")
_LINK = "give bytes per second one way, for example 3e11 for 300 GB/s"
_PLAUSIBLE = {
    "peak_tflops": _TFLOPS,
    "matmul_ceiling_tflops": _TFLOPS,
    "sustained_tflops": _TFLOPS,
    "memory_bytes": _PlausibleRange(1e8, 1e13, "give bytes, for example 85e9"),
    "memory_bytes_per_s": _PlausibleRange(1e8, 1e14, "give bytes per second, for example 2.039e12"),
    "intra_node_bytes_per_s": _PlausibleRange(1e5, 1e13, _LINK),
    "inter_node_bytes_per_s": _PlausibleRange(1e5, 1e13, _LINK),
    "inter_node_floor_bytes_per_s": _PlausibleRange(1e5, 1e13, _LINK),
    "host_link_bytes_per_s": _PlausibleRange(1e6, 1e13, _LINK),
    "host_memory_bytes": _PlausibleRange(1e8, 1e14, "give bytes, for example 1e12"),
    "power_w": _PlausibleRange(0.1, 1e5, "give watts, for example 400"),
    "price_per_device_hour": _PlausibleRange(1e-9, 1e9, "give the price of a device per hour, for example 2.5"),
}
"""Plausible range of each field, wide enough for small boards and future devices. A value outside its range has a wrong
unit."""


def check_plausible(machine: Machine) -> None:
    """Raise UserError for an implausible number. Calibrated numbers are not checked: they are measurements."""
    for field, (low, high, remedy) in _PLAUSIBLE.items():
        given = None if field in machine.calibrated else getattr(machine, field)
        values = given.items() if isinstance(given, dict) else [("", given)]
        for name, value in values:
            if value is not None and not low <= value <= high:  # also True for NaN
                shown = f"machine.{field}{'.' if name else ''}{name}={value:g}"
                raise UserError(shown, f"not between {low:g} and {high:g}", remedy)
    remedies = {"matmul_ceiling_tflops": "give the best product seen", "sustained_tflops": "give the rate of training"}
    for field, remedy in remedies.items():
        # a measured burst may exceed a published peak
        exempt = field == "matmul_ceiling_tflops" and field in machine.calibrated
        for precision, rate in getattr(machine, field).items() if not exempt else ():
            peak = machine.peak_tflops.get(precision)
            if peak and rate > peak:
                shown = f"machine.{field}.{precision}={rate:g}"
                raise UserError(shown, f"above the peak of {peak:g}", f"{remedy}, or correct the peak")
