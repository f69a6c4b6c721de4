"""Strong scaling: efficiency against nodes at a constant global batch."""

from analysis.drawing import Picture
from analysis.drawing.curves import build_efficiency
from analysis.results import Results

TITLE = "Strong scaling"
ALT = (
    "Efficiency against nodes, a curve per engine, a dashed line where it would be ideal; "
    "the global batch is the same on all nodes. The tables hold the numbers."
)
PLACE = 5


def picture(results: Results) -> Picture:
    """Return the efficiency: seconds per sample and device at the smallest node count over those at each node count."""
    return build_efficiency(results, "strong")
