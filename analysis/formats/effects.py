"""How a difference of times is written."""

from analysis.formats.numbers import format_ratio_change, format_within
from analysis.stats.compare import Comparison


def format_effect(comparison: Comparison) -> str:
    """Write the change of the time per sample with its interval."""
    known = comparison.interval
    if known is None:
        return format_ratio_change(comparison.ratio)
    change, *ends = (100 * (ratio - 1) for ratio in (comparison.ratio, known.low, known.high))
    text, low, high = format_within(change, ends[0], ends[1], "+")
    return f"{text}\u00a0%, {100 * known.level:.0f}\u00a0%: {low} to {high}\u00a0%"
