"""Weak scaling: efficiency against nodes, where the work per device stays the same on any number of nodes."""

from matplotlib.figure import Figure

from analysis import plotting
from analysis.plotting import efficiency
from analysis.results import Results

TITLE = "Weak scaling"
ALT = (
    "Efficiency against nodes, a curve per engine, a dashed line where it would be ideal; "
    "every device does the same work. The tables hold the numbers."
)
PLACE = 6


def applies(results: Results) -> bool:
    """Whether there are two node counts to compare."""
    return efficiency.has_scaling(results, "weak")


@plotting.styled
def figure(results: Results) -> Figure:
    """Draw seconds per sample and device at the smallest node count over those at each, with intervals."""
    return efficiency.draw_efficiency(results, "weak")
