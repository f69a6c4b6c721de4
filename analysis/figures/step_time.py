"""Figure of step time against node count. Configurations with equal work per step, or with equal work per device, share
a panel."""

from analysis.drawing import Picture, groups
from analysis.drawing.curves import PlottedQuantity, build_picture
from analysis.results import Results

TITLE = "Step time by engine and node count"
ALT = "Median step time against node count, with a curve per engine. Each panel has one micro-batch and equal work."
NEEDS = "runs without background load, or failed runs"
PLACE = 2

_QUANTITY = PlottedQuantity("step_s", "median step time, s", across="nodes", across_label="nodes")


def picture(results: Results) -> Picture:
    """Return the figure of median seconds per optimizer step against node count, with intervals if known."""
    return build_picture(results, groups.group_by_micro(results.summary), _QUANTITY)
