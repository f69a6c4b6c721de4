"""Figure of step time against node count. Configurations with equal work per step, or with equal work per device, share
a panel."""

from analysis.drawing import Picture, groups
from analysis.drawing.curves import PlottedQuantity, build_picture
from analysis.results import Results

TITLE = "Step time by stage and nodes"
ALT = "Median step time against nodes, a curve per engine, a panel per micro-batch and equal work."
PLACE = 2

_QUANTITY = PlottedQuantity("step_s", "s per step, median", across="nodes", across_label="nodes")


def picture(results: Results) -> Picture:
    """Return the median seconds per optimizer step, with intervals if known."""
    return build_picture(results, groups.group_by_micro(results.summary), _QUANTITY)
