"""Numbers as people read them; files that programs read hold them exactly."""

import math
from typing import Any

from analysis.columns import Column

MISSING = "–"
UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_significant(value: float, digits: int = 4) -> str:
    """Return `value` to `digits` significant digits, thousands apart, without an exponent from 10^-5 to 10^15."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    before = math.floor(math.log10(abs(value))) + 1
    if not -5 < before <= 15:
        return f"{value:.{digits - 1}e}"
    return f"{round(value, digits - before):,.{max(digits - before, 0)}f}"


def find_unit_power(value: float) -> int:
    """Return the power of 1024, and place in UNITS, of the largest unit of which `value` bytes hold at least one."""
    return min(int(math.log2(value) // 10), len(UNITS) - 1) if value >= 1 else 0


def format_size(value: float) -> str:
    """Return bytes in the largest binary unit of which there is at least one."""
    power = find_unit_power(value)
    return f"{format_significant(value / 1024**power)} {UNITS[power]}"


def format_cell(column: Column, value: Any) -> str:
    """Return a cell of the run table for a reader; `value` None is missing."""
    if value is None:
        return MISSING
    if column.kind == "truth":
        return "yes" if value else "no"
    if column.unit == "bytes":
        return format_size(value)
    if column.kind == "number":
        return format_significant(value)
    if column.kind == "integer" and column.name != "seed":
        return f"{value:,}"
    return str(value)
