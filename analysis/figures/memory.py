"""Figure of memory against micro-batch. Memory is the peak of live tensor bytes in the timed window, on the rank with
the highest peak."""

from analysis.drawing import Picture, groups
from analysis.drawing.curves import PlottedQuantity, build_picture
from analysis.formats import UNITS, find_unit_power
from analysis.results import Results

TITLE = "Memory by engine and micro-batch"
ALT = "Peak allocated bytes against micro-batch, a curve per engine, a panel per question."
PLACE = 3

_NOTE = "Peak over steady steps, on the rank with most."


def picture(results: Results) -> Picture:
    """Return the peak allocated memory per rank, in the largest binary unit in which the largest value is at least
    1."""
    peaks = results.summary["peak_allocated_bytes"].dropna()
    power = find_unit_power(float(peaks.max()) if len(peaks) else 0.0)
    label = f"peak allocated, {UNITS[power]}"
    quantity = PlottedQuantity("peak_allocated_bytes", label, interval=False, unit=1024**power)
    return build_picture(results, groups.group_by_question(results.summary), quantity, _NOTE)
