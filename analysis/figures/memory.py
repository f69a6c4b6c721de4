"""Figure of memory against micro-batch. Memory is the peak of live tensor bytes in the timed window, on the rank with
the highest peak."""

from analysis.drawing import Picture, groups
from analysis.drawing.curves import PlottedQuantity, build_picture
from analysis.results import Results

TITLE = "Peak memory by engine and micro-batch"
ALT = "Peak allocated memory per rank against micro-batch, with a curve per engine and a panel per question."
NEEDS = "runs with a recorded peak memory, or failed runs"
PLACE = 3

_QUANTITY = PlottedQuantity("peak_allocated_bytes", "peak allocated memory", interval=False, is_size=True)
_NOTE = "Peak bytes of live tensors in the timed steps, on the rank with the highest peak."


def picture(results: Results) -> Picture:
    """Return the figure of peak allocated memory per rank against micro-batch. All panels of a model have the same
    unit."""
    return build_picture(results, groups.group_by_question(results.summary), _QUANTITY, _NOTE)
