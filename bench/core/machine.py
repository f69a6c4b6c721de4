"""Description of a machine, which is one type of node: its properties, with the source of each number.

None means that a number is unknown. No number is derived from a machine's name.
"""

import datetime
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, ValidationError

from bench.core.errors import UserError
from bench.core.field_errors import build_error
from bench.core.files import find_group_files, read_yaml
from bench.core.spec import Extensible, Frozen, Name, Positive, Precision

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
    """Measurements of a machine by `zeroscale calibrate`. A field is empty or None if its measurement was not made."""

    made: dict[str, str | None] = Field({}, description="date, device and software versions of the calibration")
    matmul: Annotated[tuple[MatmulRate, ...], Table] = ()
    attention_tflops: dict[Precision, float] = Field(
        {}, description="rate of T5's attention with position bias in the forward pass"
    )
    kernel_s: float | None = Field(None, gt=0, description="seconds that the host needs to start one operation")
    slowdown: tuple[float, ...] = Field(
        (), description="compute time with 1, 2, … ranks on one processor, relative to one rank"
    )
    collectives: Annotated[tuple[CollectiveTime, ...], Table] = ()


class RentedOffer(Frozen):
    """Published price of a rented node with this machine's devices. Disks, network traffic and taxes are excluded."""

    provider: Name = Field(description="such as gcp, aws or lambda")
    machine_type: Name = Field(description="the provider's name of the node type, such as a3-highgpu-8g")
    region: str = Field(min_length=1, description="region of the price, with the zone if prices differ between zones")
    devices: Positive = Field(description="number of devices of the node")
    price_per_hour: float = Field(gt=0, description="price of the whole node for an hour")
    spot_price_per_hour: float | None = Field(
        None,
        gt=0,
        description="price of the whole node for an hour, if the provider may take it back at any time; None: unknown",
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
            raise UserError("spot", rule, "remove spot, or add spot_price_per_hour to the machine's file")
        return self.spot_price_per_hour


class Machine(Extensible):
    """A type of node, from a file of `conf/machine`. Peak rates are per device, without sparsity, in TFLOP/s."""

    LATER_FIELDS: ClassVar[frozenset[str]] = frozenset({"rented"})

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
        None, gt=0, description="your own price of a device for an hour, in any currency"
    )
    rented: tuple[RentedOffer, ...] = Field(
        (),
        description="published prices of rented nodes with these devices, each with provider, machine_type, region, "
        "devices, price_per_hour, spot_price_per_hour, currency, source and date; not stored in records",
    )
    source: str = ""
    calibrated: dict[str, str] = Field(
        {}, description="published number of each field that `zeroscale calibrate` has replaced by a measured one"
    )
    note: str = ""

    def on(self, device: str | None) -> "Machine":
        """Return a copy of this machine for a run's record. It has the kind of device that the run uses ("cpu" or
        "cuda"), and lacks the calibration tables and rental offers."""
        return self.model_copy(update={"device": device, "calibration": None, "rented": ()})

    def accepts(self, device_name: str) -> bool:
        """Return True if the name of a device matches this machine's device, ignoring case."""
        return not self.device_names or device_name.lower() in map(str.lower, self.device_names)


class _PlausibleRange(NamedTuple):
    """Lowest and highest value of a field that are plausible for any machine, and the remedy for a value outside of
    them."""

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
"""Plausible range of each field, wide enough for small boards and future devices. A value outside its range probably
has a wrong unit."""


_PLAUSIBLE_PRICE = _PlausibleRange(1e-3, 1e6, "give the price of the whole node per hour, for example 87.8")


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
    remedies = {"matmul_ceiling_tflops": "give the best product seen", "sustained_tflops": "give the rate of training"}
    for field, remedy in remedies.items():
        # a measured burst may exceed a published peak
        exempt = field == "matmul_ceiling_tflops" and field in machine.calibrated
        for precision, rate in getattr(machine, field).items() if not exempt else ():
            peak = machine.peak_tflops.get(precision)
            if peak and rate > peak:
                shown = f"machine.{field}.{precision}={rate:g}"
                raise UserError(shown, f"above the peak of {peak:g}", f"{remedy}, or correct the peak")


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
            rule = f"above price_per_hour={price:g}, though a spot node costs at most as much"
            raise UserError(f"{prefix}.spot_price_per_hour={spot:g}", rule, "exchange or correct the two prices")
        key = (offer.provider, offer.machine_type, offer.region)
        if key in seen:
            rule = f"{offer.provider} has a second price for it in {offer.region}"
            raise UserError(f"{prefix}.machine_type={offer.machine_type}", rule, "keep the newer of the two")
        seen.add(key)


class _Offers(Frozen):
    """The section `rented` of a machine file. Decoding it alone gives errors with the same keys as decoding the whole
    file."""

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
