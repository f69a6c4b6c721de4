"""From a machine's published numbers and what was measured to the machine as it is, and to its file."""

import json
from typing import Any

import yaml

from bench.calibrate import CalibrationResult
from bench.core import terminal
from bench.core.machine import Calibration, CollectiveTime, Machine
from bench.core.spec import Precision

_DIGITS = 4  # of what is measured, in the file
_UNPUBLISHED = "nothing published"


def build_machine(published: Machine, measured: CalibrationResult, name: str) -> Machine:
    """Return `published` under a new name with every number that was measured, those replaced named in `calibrated`.

    What was not measured stays, also from an earlier calibration. A link's number is the best bus bandwidth of an
    all-reduce over it, so what a collective gets of it and not what the cable says.
    """
    new, old = measured.calibration, published.calibration or Calibration()
    tables = {field: getattr(new, field) or getattr(old, field) for field in Calibration.model_fields}
    numbers = {
        "matmul_ceiling_tflops": published.matmul_ceiling_tflops | find_best_rates(new) if new.matmul else None,
        "memory_bytes_per_s": measured.memory_bytes_per_s,
        "intra_node_bytes_per_s": find_best_bus_bytes_per_s(new, between_nodes=False),
        "inter_node_bytes_per_s": find_best_bus_bytes_per_s(new, between_nodes=True),
        "host_link_bytes_per_s": measured.host_link_bytes_per_s,
    }
    update: dict[str, Any] = {field: number for field, number in numbers.items() if number is not None}
    replaced = {field: _format_published(getattr(published, field)) for field in update}
    update |= {
        "name": name,
        "device": "cpu" if new.made.get("backend") == "gloo" else "cuda",
        "device_names": published.device_names or (measured.device_name,),
        "calibration": Calibration(**tables | {"made": _merge_made(new.made, old.made)}),
        "calibrated": replaced | published.calibrated,  # what an earlier calibration replaced was published, not ours
    }
    return published.model_copy(update=update)


def _merge_made(new: dict[str, str | None], old: dict[str, str | None]) -> dict[str, str | None]:
    """Return how the last calibration was made, and which parts were measured by an earlier one."""
    if not old:
        return new
    last = f"{old.get('parts')} on {old.get('date')} by {old.get('ranks')} ranks"
    return new | {"earlier": "; ".join(filter(None, [old.get("earlier"), last]))}


def compute_bus_bytes_per_s(row: CollectiveTime) -> float:
    """Return an all-reduce's bus bandwidth, 2 (n - 1) / n × payload ÷ time (nccl-tests, doc/PERFORMANCE.md)."""
    return 2 * (row.ranks - 1) / row.ranks * row.payload_bytes / row.s


def find_best_bus_bytes_per_s(calibration: Calibration, *, between_nodes: bool) -> float | None:
    """Return the best bus bandwidth of all-reduces within a node, or over the most nodes, or None without any; at each
    group's largest payload, for a smaller one may pass in a burst. In a ring over nodes each of them sends that much,
    however many of its ranks take part."""
    largest: dict[tuple[int, int], CollectiveTime] = {}
    for row in sorted(calibration.collectives, key=lambda row: row.payload_bytes):
        if row.kind == "all_reduce" and row.ranks > 1:
            largest[row.nodes, row.ranks] = row
    nodes = max((nodes for nodes, _ in largest), default=1) if between_nodes else 1
    if between_nodes and nodes == 1:
        return None
    return max((compute_bus_bytes_per_s(row) for (over, _), row in largest.items() if over == nodes), default=None)


def find_best_rates(calibration: Calibration) -> dict[Precision, float]:
    """Return the highest rate of any shape by precision, in 10^12 FLOP/s."""
    best: dict[Precision, float] = {}
    for row in calibration.matmul:
        best[row.precision] = max(row.tflops, best.get(row.precision, 0.0))
    return best


def _format_published(number: Any) -> str:
    return json.dumps(number) if number else _UNPUBLISHED


def format_yaml(machine: Machine) -> str:
    """Return the file of a calibrated machine, for a folder like conf/machine."""
    plain = machine.model_dump(mode="json", exclude_defaults=True)
    for field, rows in plain.get("calibration", {}).items():
        if field in ("matmul", "collectives"):
            plain["calibration"][field] = _format_table(rows)
    body = yaml.dump(plain, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=10**6)
    return f"{_format_heading(machine)}\n{body}"


def _format_heading(machine: Machine) -> str:
    made = machine.calibration.made if machine.calibration else {}
    versions = ", ".join(f"{name} {made[name]}" for name in ("zeroscale", "torch", "cuda", "nccl") if made.get(name))
    return "\n".join(
        [
            f"# {machine.name}: measured on {made.get('date')} by `zeroscale calibrate` ({versions}),",
            f"# on {made.get('device')}, over {made.get('backend')}; nodes × ranks: {made.get('ranks')}, "
            f"threads of a rank: {made.get('threads')}.",
            "# `calibrated` names the numbers that were measured here, and those published that they replace;",
            "# other numbers are as published.",
        ]
    )


def format_calibration(machine: Machine) -> str:
    """Return the calibration's main numbers, for a reader."""
    found = machine.calibration or Calibration()
    rows = [(f"matmul {precision}", f"up to {best:.4g} TFLOP/s") for precision, best in find_best_rates(found).items()]
    rows += [(f"attention {precision}", f"{rate:.4g} TFLOP/s") for precision, rate in found.attention_tflops.items()]
    links = {"memory copy": machine.memory_bytes_per_s, "host link": machine.host_link_bytes_per_s}
    rows += [(name, f"{rate / 1e9:.4g} GB/s") for name, rate in links.items() if rate]
    rows += [("one operation", f"{found.kernel_s * 1e6:.3g} µs of the host")] if found.kernel_s else []
    slower = ", ".join(f"{times:.3g}" for times in found.slowdown)
    rows += [("at once", f"{slower} times as long")] if slower else []
    for nodes, ranks in dict.fromkeys((row.nodes, row.ranks) for row in found.collectives if row.ranks > 1):
        reduced = [row for row in found.collectives if (row.kind, row.nodes, row.ranks) == ("all_reduce", nodes, ranks)]
        *_, largest = sorted(reduced, key=lambda row: row.payload_bytes)
        speed = (
            f"{compute_bus_bytes_per_s(largest) / 1e9:.4g} GB/s on the bus at {largest.payload_bytes / 2**20:.3g} MiB"
        )
        latency = min(row.s for row in reduced)
        rows.append((f"all-reduce, {nodes} × {ranks // nodes}", f"from {latency * 1e6:.4g} µs, {speed}"))
    rows += [("not measured", text)] if (text := found.made.get("not_measured")) else []
    heading = f"{machine.name}: {found.made.get('device')}, threads of a rank: {found.made.get('threads')}"
    return f"{heading}\n{terminal.align(rows, least=(22,), gap=0, indent=2)}"


def _format_table(rows: list[dict[str, Any]]) -> str:
    """Return rows as lines of words below the names of their columns, as Calibration reads them."""
    words = (
        [_format_number(value) if isinstance(value, float) else str(value) for value in row.values()] for row in rows
    )
    return "".join(f"{' '.join(line)}\n" for line in (rows[0], *words))


def _format_number(value: float) -> str:
    """Return a float to what a measurement is good for, with a dot, without which YAML 1.1 sees text in 1e+07."""
    mantissa, *exponent = f"{value:.{_DIGITS}g}".split("e")
    return "e".join([mantissa if "." in mantissa else f"{mantissa}.0", *exponent])


class _Dumper(yaml.SafeDumper):
    """Writes floats shortly and tables as blocks."""


def _represent_float(dumper: yaml.SafeDumper, value: float) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:float", _format_number(value))


def _represent_text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)


_Dumper.add_representer(float, _represent_float)
_Dumper.add_representer(str, _represent_text)
