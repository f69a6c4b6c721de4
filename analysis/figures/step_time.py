"""Step time against nodes, with a panel per equal work."""

from analysis.drawing import Picture, groups
from analysis.drawing.curves import PlottedQuantity, build_picture
from analysis.results import Results

TITLE = "Step time by stage and nodes"
ALT = "Median step time against nodes, a curve per engine, a panel per micro-batch and equal work."
PLACE = 2

_QUANTITY = PlottedQuantity("step_s", "s per step, median", across="nodes", across_label="nodes")


def picture(results: Results) -> Picture:
    """Return the median seconds of an optimizer step, with intervals where known."""
    return build_picture(results, groups.group_by_micro(results.summary), _QUANTITY)
