"""A comparison for programs: JSON and CSV, numbers exact, missing is null or empty."""

import csv
import json
from typing import Any

from analysis.compare import SetComparison
from analysis.compare.judging import PairResult
from analysis.compare.phrases import format_headline
from analysis.compare.quantities import QuantityChange
from analysis.csv_cells import CsvLines, escape_cell

_SIDE = (
    "config_id", "environment_id", "machine", "sample_s", "step_s", "peak_allocated_bytes", "n", "outcome", "flags",
)  # fmt: skip


def to_json(compared: SetComparison) -> str:
    """Return the outcome and an object for each line."""
    a, b = compared.question.called
    plain = {
        "a": a,
        "b": b,
        "across": [part.name for part in compared.question.across],
        "gate": _dump_gate(compared),
        "verdict": compared.verdict,
        "broken": compared.broken,
        "headline": format_headline(compared),
        "lines": [
            {**_build_row(name, line), "changes": [change._asdict() for change in line.changes]}
            for name, line in compared.lines
        ],
    }
    return json.dumps(plain, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def to_csv(compared: SetComparison) -> str:
    """Return a row for each line; what changed is told as `name: values of A -> values of B`."""
    rows = [
        {**_build_row(name, line), "changes": "; ".join(map(_format_raw_change, line.changes))}
        for name, line in compared.lines
    ]
    lines, names = CsvLines(), list(rows[0]) if rows else ["name"]
    writer = csv.DictWriter(lines, names, lineterminator=lines.END)
    writer.writeheader()
    writer.writerows({n: escape_cell(v) if isinstance(v, str) else v for n, v in row.items()} for row in rows)
    return str(lines)


def _build_row(name: str, line: PairResult) -> dict[str, Any]:
    found = line.comparison
    interval = found.interval if found else None
    return {
        "name": name,
        "status": line.status,
        "why": line.why,
        "held": line.held,
        "doubts": ", ".join(line.gate_reasons),
        "ratio": found and found.ratio,
        "ratio_low": interval and interval.low,
        "ratio_high": interval and interval.high,
        "interval_kind": interval and interval.kind,
        "interval_level": interval and interval.level,
        "p": found and found.p,
        "cliffs_delta": found and found.cliffs_delta,
        "unit": found and found.unit,
        "a_runs": line.runs and line.runs[0],
        "b_runs": line.runs and line.runs[1],
        **{f"{side}_{key}": one and one.row[key] for side, one in (("a", line.a), ("b", line.b)) for key in _SIDE},
    }


def _dump_gate(compared: SetComparison) -> dict[str, Any] | None:
    gate = compared.question.gate
    return gate and gate._asdict() | {"allowed": sorted(gate.allowed)}


def _format_raw_change(change: QuantityChange) -> str:
    a, b = (" ".join(map(str, side)) for side in (change.a, change.b))
    return f"{change.name}: {a} -> {b}"
