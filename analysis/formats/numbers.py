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


def format_within(value: float, low: float, high: float, sign: str = "") -> tuple[str, str, str]:
    """Return a value and the ends of its interval, all to the place of the second digit of the interval's width: more
    digits would tell what nobody knows. An interval without a width, or an end that is not finite, tells no digits:
    then to four significant ones. `sign` "+" writes one before positive values."""
    width = high - low
    known = math.isfinite(width) and width > 0
    decimals = 1 - math.floor(math.log10(width)) if known else 0

    def write(one: float) -> str:
        return _format_to(one, decimals, sign) if known else sign * (one > 0) + format_significant(one)

    return write(value), write(low), write(high)


def format_short(value: float, low: float, high: float) -> tuple[str, str]:
    """Return a value to three significant digits, or fewer where its interval tells no more, and beside it the
    interval with the digits that it tells."""
    text, *ends = format_within(value, low, high)
    width = high - low
    coarse = value == 0 or (math.isfinite(width) and width >= 10.0 ** (math.floor(math.log10(abs(value))) - 1))
    return text if coarse else format_significant(value, 3), " to ".join(ends)


def format_interval_of(value: float, low: float, high: float) -> str:
    """Return a value with its interval behind it."""
    text, *ends = format_within(value, low, high)
    return f"{text} ({' to '.join(ends)})"


def format_ratio_change(ratio: float, low: float | None = None, high: float | None = None) -> str:
    """Return a ratio as a change in percent, with its interval where one is known: +5.1 % (+4.0 to +6.3)."""
    change = 100 * (ratio - 1)
    if low is None or high is None:
        return f"{'+' if change >= 0 else '−'}{format_significant(abs(change), 2)} %"
    text, *ends = format_within(change, 100 * (low - 1), 100 * (high - 1), "+")
    return f"{text} % ({' to '.join(ends)})"


def _format_to(value: float, decimals: int, sign: str) -> str:
    rounded = round(value, decimals)
    if abs(rounded) >= 1e15:
        return format_significant(value)
    text = f"{abs(rounded):,.{max(decimals, 0)}f}"
    return ("−" if rounded < 0 else sign * (rounded > 0)) + text


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
