"""Description of a machine, which is one type of node: its properties, with the source of each number.

None means that a number is unknown. No number is derived from a machine's name.
"""

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, ValidationError

from bench.core.errors import UserError
from bench.core.field_errors import build_error
from bench.core.files import find_group_files, read_yaml
from bench.core.spec import Extensible, Frozen, Name, Positive, Precision

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter"]


ProductKind = Literal["forward", "inputs", "weights"]
"""Role of a matrix product of a layer: the layer's result in the forward pass, or the gradient of its inputs or of its
weights in the backward pass. The operands of the three products are stored differently, so their rates may differ."""


class MatmulRate(Frozen):
    """Measured rate of one matrix product, m × k times k × n: the median of many calls."""

    precision: Precision
    kind: ProductKind = "forward"
    m: Positive
    k: Positive
    n: Positive
    tflops: float = Field(gt=0)


class CollectiveTime(Frozen):
    """Measured seconds of one collective with fp32 elements. A call takes as long as its slowest rank. `s` is the
    median over several calls.

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
    """Measurements of a machine by `zeroscale calibrate`. A field is empty or None if its measurement was not made."""

    made: dict[str, str | None] = Field({}, description="date, device and software versions of the calibration")
    matmul: Annotated[tuple[MatmulRate, ...], Table] = Field((), description="rates of matrix products by size")
    attention_tflops: dict[Precision, float] = Field(
        {}, description="rate of attention with T5's position bias in forward, by precision, in 10^12 FLOP/s"
    )
    kernel_s: float | None = Field(
        None, gt=0, description="seconds that the host needs to start one operation of the device"
    )
    slowdown: tuple[float, ...] = Field(
        (), description="compute time of a rank if 1, 2, … ranks share the processor, relative to a single rank"
    )
    collectives: Annotated[tuple[CollectiveTime, ...], Table] = Field(
        (), description="seconds of collectives by kind, number of nodes and ranks, and payload"
    )


class RentedOffer(Frozen):
    """Published price of a rented node with this machine's devices. Disks, network traffic and taxes are excluded."""

    provider: Name = Field(description="company that rents the node, such as gcp, aws or lambda")
    machine_type: Name = Field(description="the provider's name of the node type, such as a3-highgpu-8g")
    region: str = Field(min_length=1, description="region of the price, with the zone if prices differ between zones")
    devices: Positive = Field(description="number of devices of the node")
    price_per_hour: float = Field(gt=0, description="price of the whole node per hour")
    spot_price_per_hour: float | None = Field(
        None,
        gt=0,
        description="price of the whole node per hour as a spot instance, which the provider may reclaim at any time; "
        "None: unknown",
    )
    currency: str = Field("USD", min_length=1, max_length=8, description="currency of the prices")
    source: str = Field(min_length=1, description="page or file that states the prices, with its version")
    date: datetime.date = Field(description="day on which the source was read")

    def find_price(self, *, spot: bool) -> float:
        """Return the price of the node for an hour. Raise UserError if `spot` is True and the spot price is unknown."""
        if not spot:
            return self.price_per_hour
        if self.spot_price_per_hour is None:
            rule = f"the spot price of {self.machine_type} from {self.provider} is unknown"
            raise UserError("spot", rule, "remove spot, or set spot_price_per_hour in the machine's file")
        return self.spot_price_per_hour


class Machine(Extensible):
    """A type of node, from a file of `conf/machine`. Peak rates are per device, without sparsity, in TFLOP/s."""

    LATER_FIELDS: ClassVar[frozenset[str]] = frozenset({"rented"})

    name: Name = Field(description="name of the machine in tables and records")
    device: str | None = Field(None, description='kind of device, "cpu" or "cuda"; None: a GPU if the machine has one')
    device_names: tuple[str, ...] = Field(
        (), description="device names as the driver reports them; a run on another device is refused; empty: any"
    )
    devices_per_node: Positive | None = Field(None, description="number of devices of a node; None: unknown")
    peak_tflops: dict[Precision, float] = Field(
        {}, description="published peak rate of a device by precision, in 10^12 FLOP/s, without sparsity"
    )
    unsupported: tuple[Precision, ...] = Field((), description="precisions that the device does not support")
    matmul_ceiling_tflops: dict[Precision, float] = Field(
        {}, description="highest measured rate of matrix products in short bursts, in 10^12 FLOP/s"
    )
    sustained_tflops: dict[Precision, float] = Field(
        {}, description="rate of large matrix products during a long training, in 10^12 FLOP/s"
    )
    attention_of_matmul: float | None = Field(
        None, gt=0, le=1, description="FLOP rate of attention divided by the FLOP rate of matrix products"
    )
    multiprocessors: Positive | None = Field(
        None, description="number of multiprocessors per device: NVIDIA's SMs, AMD's compute units"
    )
    memory_bytes: Positive | None = Field(
        None, description="memory of a device as its driver reports it: 42.5e9 for a 40 GB card"
    )
    memory_bytes_per_s: float | None = Field(None, gt=0, description="bandwidth of a device's memory")
    intra_node_bytes_per_s: float | None = Field(
        None, gt=0, description="bandwidth of a device to the other devices of its node, in one direction"
    )
    inter_node_bytes_per_s: float | None = Field(
        None, gt=0, description="bandwidth of a node to other nodes over all its network cards, in one direction"
    )
    inter_node_floor_bytes_per_s: float | None = Field(
        None,
        gt=0,
        description="minimum bandwidth between two ranks on different nodes, in one direction; a run with less "
        "ends as `invalid`",
    )
    nodes_share_processor: bool = Field(
        False, description="True: all nodes are emulated on one processor, as in slurm/testbed"
    )
    power_w: float | None = Field(None, gt=0, description="power limit of a device in watts")
    host_memory_bytes: Positive | None = Field(None, description="host memory of a node")
    host_link_bytes_per_s: float | None = Field(
        None, gt=0, description="bandwidth between a device and its host, in one direction"
    )
    calibration: Calibration | None = Field(None, description="measured rates of this machine; not stored in records")
    price_per_device_hour: float | None = Field(
        None, gt=0, description="price of a device per hour on your own terms, in any currency"
    )
    rented: tuple[RentedOffer, ...] = Field(
        (),
        description="published prices of rented nodes with these devices. Keys of each: provider, machine_type, "
        "region, devices, price_per_hour, spot_price_per_hour, currency, source, date. Not stored in records",
    )
    source: str = Field("", description="publications that state the numbers above")
    calibrated: dict[str, str] = Field(
        {},
        description="fields that `zeroscale calibrate` has measured, each with the published number that it replaced",
    )
    note: str = Field("", description="remark for readers of this file")

    def on(self, device: str | None) -> "Machine":
        """Return a copy of this machine for a run's record. It has the kind of device that the run uses ("cpu" or
        "cuda"), and lacks the calibration tables and rental offers."""
        return self.model_copy(update={"device": device, "calibration": None, "rented": ()})

    def accepts(self, device_name: str) -> bool:
        """Return True if the name of a device matches this machine's device, ignoring case."""
        return not self.device_names or device_name.lower() in map(str.lower, self.device_names)


_TFLOPS = (1e-4, 1e5, "the unit is 10^12 FLOP/s, for example 312")
_LINK = "the unit is bytes per second in one direction, for example 3e11 for 300 GB/s"
_PLAUSIBLE: dict[str, tuple[float, float, str]] = {
    "peak_tflops": _TFLOPS,
    "matmul_ceiling_tflops": _TFLOPS,
    "sustained_tflops": _TFLOPS,
    "memory_bytes": (1e8, 1e13, "the unit is bytes, for example 85e9"),
    "memory_bytes_per_s": (1e8, 1e14, "the unit is bytes per second, for example 2.039e12"),
    "intra_node_bytes_per_s": (1e5, 1e13, _LINK),
    "inter_node_bytes_per_s": (1e5, 1e13, _LINK),
    "inter_node_floor_bytes_per_s": (1e5, 1e13, _LINK),
    "host_link_bytes_per_s": (1e6, 1e13, _LINK),
    "host_memory_bytes": (1e8, 1e14, "the unit is bytes, for example 1e12"),
    "power_w": (0.1, 1e5, "the unit is watts, for example 400"),
    "price_per_device_hour": (1e-9, 1e9, "the unit is the price of a device per hour, for example 2.5"),
}
"""Lowest and highest plausible value of each field, and the remedy for a value outside of this range. The ranges are
wide enough for small boards and future devices. A value outside its range probably has a wrong unit."""


_PLAUSIBLE_PRICE = (1e-3, 1e6, "the unit is the price of the whole node per hour, for example 87.8")


def check_plausible(machine: Machine) -> None:
    """Raise UserError for an implausible number. Calibrated numbers are not checked: they are measurements."""
    _check_offers(machine.rented)
    for field, (low, high, remedy) in _PLAUSIBLE.items():
        given = None if field in machine.calibrated else getattr(machine, field)
        values = given.items() if isinstance(given, dict) else [("", given)]
        for name, value in values:
            if value is not None and not low <= value <= high:  # also True for NaN
                shown = f"machine.{field}{'.' if name else ''}{name}={value:g}"
                raise UserError(shown, f"not between {low:g} and {high:g}", remedy)
    remedies = {
        "matmul_ceiling_tflops": "set the highest measured rate",
        "sustained_tflops": "set the rate during a training",
    }
    for field, remedy in remedies.items():
        # a measured burst may exceed a published peak
        exempt = field == "matmul_ceiling_tflops" and field in machine.calibrated
        for precision, rate in getattr(machine, field).items() if not exempt else ():
            peak = machine.peak_tflops.get(precision)
            if peak and rate > peak:
                shown = f"machine.{field}.{precision}={rate:g}"
                raise UserError(shown, f"above peak_tflops.{precision}={peak:g}", f"{remedy}, or correct the peak")


def _check_offers(offers: tuple[RentedOffer, ...]) -> None:
    """Raise UserError for an offer with an implausible price, or for two prices of one node type in one region."""
    seen: set[tuple[str, str, str]] = set()
    low, high, remedy = _PLAUSIBLE_PRICE
    for place, offer in enumerate(offers):
        prefix, price, spot = f"machine.rented.{place}", offer.price_per_hour, offer.spot_price_per_hour
        for name, value in (("price_per_hour", price), ("spot_price_per_hour", spot)):
            if value is not None and not low <= value <= high:
                raise UserError(f"{prefix}.{name}={value:g}", f"not between {low:g} and {high:g}", remedy)
        if spot is not None and spot > price:
            rule = f"above price_per_hour={price:g}, but a spot node never costs more"
            raise UserError(f"{prefix}.spot_price_per_hour={spot:g}", rule, "exchange or correct the two prices")
        key = (offer.provider, offer.machine_type, offer.region)
        if key in seen:
            rule = f"is listed twice for {offer.provider} in {offer.region}"
            raise UserError(f"{prefix}.machine_type={offer.machine_type}", rule, "remove the older entry")
        seen.add(key)


class _Offers(Frozen):
    """The section `rented` of a machine file. If it is decoded alone, errors name the same keys as if the whole file
    were decoded."""

    rented: tuple[RentedOffer, ...]


def list_offers(config_dir: Path | None = None) -> Iterator[tuple[str, RentedOffer]]:
    """Yield every rental offer in the files of conf/machine and `config_dir`, each with the name of its file. Raise
    UserError for an invalid offer."""
    for name, file in find_group_files("machine", config_dir).items():
        if b"rented:" not in file.read_bytes():  # parsing all files would take twice as long
            continue
        plain = read_yaml(file, f"machine={name}")
        try:
            offers = _Offers(rented=plain.get("rented", ())).rented
            _check_offers(offers)
        except ValidationError as error:
            wrong = build_error(error, _Offers, "machine")
            raise UserError(f"{file}: {wrong.value}", wrong.rule, wrong.remedy) from error
        except UserError as error:
            raise UserError(f"{file}: {error.value}", error.rule, error.remedy) from error
        yield from ((name, offer) for offer in offers)
