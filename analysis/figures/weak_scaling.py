"""Weak scaling: efficiency against nodes, where the work per device stays the same on any number of nodes."""

from matplotlib.figure import Figure

from analysis.charts import Chart, efficiency
from analysis.plotting.charts import draw_chart
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


def chart(results: Results) -> Chart:
    """Return seconds per sample and device at the smallest node count over those at each, with intervals."""
    return efficiency.build_efficiency_chart(results, "weak")


def figure(results: Results) -> Figure:
    """Draw it for print."""
    return draw_chart(chart(results))
