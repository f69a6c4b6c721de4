"""Figure of memory against micro-batch. Memory is the peak of live tensor bytes in the timed window, on the rank with
the highest peak."""

from analysis.drawing import Picture, groups
from analysis.drawing.curves import PlottedQuantity, build_picture
from analysis.formats import UNITS, find_unit_power
from analysis.results import Results

TITLE = "Peak memory by engine and micro-batch"
ALT = "Peak allocated memory per rank against micro-batch, with a curve per engine and a panel per question."
PLACE = 3

_NOTE = "Peak bytes of live tensors in the timed steps, on the rank with the highest peak."


def picture(results: Results) -> Picture:
    """Return the peak allocated memory per rank, in the largest binary unit in which the largest value is at least
    1."""
    peaks = results.summary["peak_allocated_bytes"].dropna()
    power = find_unit_power(float(peaks.max()) if len(peaks) else 0.0)
    label = f"peak allocated memory, {UNITS[power]}"
    quantity = PlottedQuantity("peak_allocated_bytes", label, interval=False, unit=1024**power)
    return build_picture(results, groups.group_by_question(results.summary), quantity, _NOTE)
