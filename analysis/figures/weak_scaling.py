"""Figure of weak scaling: efficiency against node count at constant work per device."""

from analysis.drawing import Picture
from analysis.drawing.curves import build_efficiency
from analysis.results import Results

TITLE = "Weak scaling"
ALT = "Efficiency against node count at constant work per device, with a curve per engine and a line for ideal scaling."
NEEDS = "times at two or more numbers of nodes with the same work per device"
PLACE = 6


def picture(results: Results) -> Picture:
    """Return the figure of efficiency against node count. Efficiency is device-seconds per sample at the smallest node
    count, divided by device-seconds per sample at each node count."""
    return build_efficiency(results, "weak")
