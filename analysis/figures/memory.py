"""Figure of memory against micro-batch. Memory is the peak of live tensor bytes in the timed window, on the rank with
the highest peak."""

from analysis.drawing import Picture, groups
from analysis.drawing.curves import PlottedQuantity, build_picture
from analysis.results import Results

TITLE = "Memory by engine and micro-batch"
ALT = "Peak allocated bytes against micro-batch, a curve per engine, a panel per question."
PLACE = 3

_QUANTITY = PlottedQuantity("peak_allocated_bytes", "peak allocated", interval=False, is_size=True)
_NOTE = "Peak over steady steps, on the rank with most."


def picture(results: Results) -> Picture:
    """Return the peak allocated memory per rank. All panels of a model have the same unit."""
    return build_picture(results, groups.group_by_question(results.summary), _QUANTITY, _NOTE)
