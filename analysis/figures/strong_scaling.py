"""Figure of strong scaling: efficiency against node count at a constant global batch."""

from analysis.drawing import Picture
from analysis.drawing.curves import build_efficiency
from analysis.results import Results

TITLE = "Strong scaling"
ALT = "Efficiency against node count at a constant global batch, with a curve per engine and a line for ideal scaling."
NEEDS = "times at two or more numbers of nodes with the same global batch"
PLACE = 5


def picture(results: Results) -> Picture:
    """Return the figure of efficiency against node count. Efficiency is device-seconds per sample at the smallest node
    count, divided by device-seconds per sample at each node count."""
    return build_efficiency(results, "strong")
