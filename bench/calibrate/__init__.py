"""Calibration of a machine: it measures the machine's operations and writes tables that predictions read.

The processes of a calibration exchange its request and its result as files in a folder. This module defines both, and
makes the machine file from a result.
"""

import json
from typing import Any, Literal

import yaml
from pydantic import Field

from bench.core import terminal
from bench.core.machine import Calibration, CollectiveTime, Machine
from bench.core.record import Network
from bench.core.spec import Frozen, Positive, Precision

REQUEST, MEASURED, FAILURE, DOING = "asked.json", "measured.json", "failure.txt", "doing.txt"

Part = Literal["matmul", "sustained", "attention", "memory", "launches", "host_link", "contention", "collectives"]

SHARES: dict[Part, float] = {
    "matmul": 0.28,
    "sustained": 0.15,
    "attention": 0.03,
    "memory": 0.03,
    "launches": 0.02,
    "host_link": 0.03,
    "contention": 0.08,
    "collectives": 0.38,
}
"""Share of the requested time for each part of a calibration. Only `matmul`, `sustained`, `contention` and
`collectives` may use their whole share. The other parts do a fixed amount of work."""
ELSEWHERE: dict[str, tuple[Part, ...]] = {"cpu": ("sustained", "host_link"), "cuda": ("contention",)}
"""The parts of a calibration that are skipped, by kind of device. A CPU is the host itself, so it has no link to a
host, and its sustained rate is not measured apart. A GPU is not shared by ranks, so it has no contention."""
_DIGITS = 4  # significant digits of measured numbers in the file


class CalibrationRequest(Frozen):
    """Request for a calibration: machine, processes, time and the parts to measure."""

    machine: Machine
    device: Literal["cpu", "cuda"]
    nodes: Positive
    ranks_per_node: Positive
    seconds: float = Field(gt=0)
    parts: tuple[Part, ...]
    products: tuple[tuple[int, int], ...] = ()  # shapes (k, n) of the weight matrices of models
    network: Network = Network()

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def seconds_for(self, part: Part) -> float:
        """Return the seconds for one part of the calibration, such as the matrix products. The requested parts share
        the total time in proportion to SHARES."""
        return self.seconds * SHARES[part] / sum(SHARES[other] for other in self.parts)


class CalibrationResult(Frozen):
    """Measured numbers of a calibration. A field is empty or None if its part was not requested."""

    device_name: str
    calibration: Calibration
    sustained_tflops: dict[Precision, float] = {}
    memory_bytes_per_s: float | None = None
    host_link_bytes_per_s: float | None = None


# -- the machine that a result makes


def build_machine(published: Machine, measured: CalibrationResult, name: str) -> Machine:
    """Return the machine `published` under a new name, with the measured numbers in place of the published numbers. The
    field `calibrated` lists the replaced numbers.

    Numbers that were not measured are kept, including those of an earlier calibration. The speed of each link becomes
    the best bus bandwidth of an all-reduce over this link. The new speed is therefore the rate of a collective, and not
    the rate of the cable.
    """
    new, old = measured.calibration, published.calibration or Calibration()
    tables = {field: getattr(new, field) or getattr(old, field) for field in Calibration.model_fields}
    numbers = {
        "matmul_ceiling_tflops": published.matmul_ceiling_tflops | find_best_rates(new) if new.matmul else None,
        "sustained_tflops": published.sustained_tflops | measured.sustained_tflops
        if measured.sustained_tflops
        else None,
        "memory_bytes_per_s": measured.memory_bytes_per_s,
        "intra_node_bytes_per_s": find_best_bus_bytes_per_s(new, between_nodes=False),
        "inter_node_bytes_per_s": find_best_bus_bytes_per_s(new, between_nodes=True),
        "host_link_bytes_per_s": measured.host_link_bytes_per_s,
    }
    update: dict[str, Any] = {field: number for field, number in numbers.items() if number is not None}
    replaced = {
        field: json.dumps(number) if (number := getattr(published, field)) else "nothing published" for field in update
    }
    made = new.made
    if old.made:  # parts that this calibration did not measure are kept from an earlier one
        last = f"{old.made.get('parts')} on {old.made.get('date')} by {old.made.get('ranks')} ranks"
        made = new.made | {"earlier": "; ".join(filter(None, [old.made.get("earlier"), last]))}
    update |= {
        "name": name,
        "device": "cpu" if new.made.get("backend") == "gloo" else "cuda",
        "device_names": published.device_names or (measured.device_name,),
        "calibration": Calibration(**tables | {"made": made}),
        # published numbers that an earlier calibration replaced are kept
        "calibrated": replaced | published.calibrated,
    }
    return published.model_copy(update=update)


def compute_bus_bytes_per_s(row: CollectiveTime) -> float:
    """Return the bus bandwidth of an all-reduce in bytes/s. For n ranks it is 2 (n - 1) / n × payload ÷ time
    (nccl-tests, doc/PERFORMANCE.md)."""
    return 2 * (row.ranks - 1) / row.ranks * row.payload_bytes / row.s


def find_best_bus_bytes_per_s(calibration: Calibration, *, between_nodes: bool) -> float | None:
    """Return the best measured bus bandwidth of an all-reduce in bytes/s; None without a measurement.

    If `between_nodes` is True, only the measurements over the largest number of nodes are used. Otherwise only the
    measurements within one node are used. For each group of ranks, only the largest payload is used, since a smaller
    payload may be sent faster in a burst.

    In a ring all-reduce over several nodes, each node sends data to the next node at the bus bandwidth. This holds for
    any number of ranks per node.
    """
    largest: dict[tuple[int, int], CollectiveTime] = {}
    for row in sorted(calibration.collectives, key=lambda row: row.payload_bytes):
        if row.kind == "all_reduce" and row.ranks > 1:
            largest[row.nodes, row.ranks] = row
    nodes = max((nodes for nodes, _ in largest), default=1) if between_nodes else 1
    if between_nodes and nodes == 1:
        return None
    return max((compute_bus_bytes_per_s(row) for (over, _), row in largest.items() if over == nodes), default=None)


def find_best_rates(calibration: Calibration) -> dict[Precision, float]:
    """Return the highest measured rate of a matrix product for each precision, in TFLOP/s."""
    best: dict[Precision, float] = {}
    for row in calibration.matmul:
        best[row.precision] = max(row.tflops, best.get(row.precision, 0.0))
    return best


# -- the machine as a file, and as text


def format_yaml(machine: Machine) -> str:
    """Return a calibrated machine as the YAML text of a machine file, such as the files in conf/machine."""
    plain = machine.model_dump(mode="json", exclude_defaults=True)
    for field in {"matmul", "collectives"}.intersection(plain.get("calibration", {})):
        # a table as text, a line for each row; Calibration can read this form
        rows = [row.model_dump(mode="json") for row in getattr(machine.calibration, field)]
        words = ([_format_number(v) if isinstance(v, float) else str(v) for v in row.values()] for row in rows)
        plain["calibration"][field] = "".join(f"{' '.join(line)}\n" for line in (rows[0], *words))
    body = yaml.dump(plain, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=10**6)
    made = machine.calibration.made if machine.calibration else {}
    versions = ", ".join(f"{name} {made[name]}" for name in ("zeroscale", "torch", "cuda", "nccl") if made.get(name))
    return (
        f"# {machine.name}: measured on {made.get('date')} by `zeroscale calibrate` ({versions}),\n"
        f"# on {made.get('device')}, over {made.get('backend')}; nodes × ranks: {made.get('ranks')}, "
        f"threads of a rank: {made.get('threads')}.\n"
        "# `calibrated` lists the numbers that were measured here, with the published numbers that they replace.\n"
        f"# Other numbers are published.\n{body}"
    )


def format_calibration(machine: Machine) -> str:
    """Return the main numbers of a calibration as text for a terminal."""
    found = machine.calibration or Calibration()
    rows = [(f"matmul {precision}", f"up to {best:.4g} TFLOP/s") for precision, best in find_best_rates(found).items()]
    replaced = machine.calibrated.get("sustained_tflops")
    rows += [
        (f"sustained {precision}", f"{rate:.4g} TFLOP/s")
        for precision, rate in machine.sustained_tflops.items()
        if replaced and json.dumps({precision: rate})[1:-1] not in replaced  # a published rate was kept
    ]
    rows += [(f"attention {precision}", f"{rate:.4g} TFLOP/s") for precision, rate in found.attention_tflops.items()]
    links = {"memory copy": machine.memory_bytes_per_s, "host link": machine.host_link_bytes_per_s}
    rows += [(name, f"{rate / 1e9:.4g} GB/s") for name, rate in links.items() if rate]
    rows += [("one operation", f"{found.kernel_s * 1e6:.3g} µs of the host")] if found.kernel_s else []
    slower = ", ".join(f"{times:.3g}" for times in found.slowdown)
    rows += [("ranks at once", f"{slower} times as long")] if slower else []
    for nodes, ranks in dict.fromkeys((row.nodes, row.ranks) for row in found.collectives if row.ranks > 1):
        reduced = [row for row in found.collectives if (row.kind, row.nodes, row.ranks) == ("all_reduce", nodes, ranks)]
        largest, latency = max(reduced, key=lambda row: row.payload_bytes), min(row.s for row in reduced)
        size = f"{largest.payload_bytes / 1e9:.3g} GB"
        speed = f"{compute_bus_bytes_per_s(largest) / 1e9:.4g} GB/s on the bus at {size}"
        rows.append((f"all-reduce, {nodes} × {ranks // nodes}", f"from {latency * 1e6:.4g} µs, {speed}"))
    rows += [("not measured", text)] if (text := found.made.get("not_measured")) else []
    heading = f"{machine.name}: {found.made.get('device')}, threads of a rank: {found.made.get('threads')}"
    return f"{heading}\n{terminal.align(rows, least=(22,), gap=0, indent=2)}"


def _format_number(value: float) -> str:
    """Return a float as text with four significant digits and a dot. Without a dot, YAML 1.1 reads 1e+07 as text."""
    mantissa, *exponent = f"{value:.{_DIGITS}g}".split("e")
    return "e".join([mantissa if "." in mantissa else f"{mantissa}.0", *exponent])


class _Dumper(yaml.SafeDumper):
    """YAML writer. It writes floats with four significant digits, and a text of several lines as a block."""


_Dumper.add_representer(float, lambda dumper, v: dumper.represent_scalar("tag:yaml.org,2002:float", _format_number(v)))
_Dumper.add_representer(
    str, lambda dumper, v: dumper.represent_scalar("tag:yaml.org,2002:str", v, style="|" if "\n" in v else None)
)
