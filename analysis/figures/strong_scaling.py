"""Strong scaling: efficiency against nodes, where the global batch stays the same on any number of nodes."""

from matplotlib.figure import Figure

from analysis.charts import Chart, efficiency
from analysis.plotting.charts import draw_chart
from analysis.results import Results

TITLE = "Strong scaling"
ALT = (
    "Efficiency against nodes, a curve per engine, a dashed line where it would be ideal; "
    "the global batch is the same on all nodes. The tables hold the numbers."
)
PLACE = 5


def applies(results: Results) -> bool:
    """Whether there are two node counts to compare."""
    return efficiency.has_scaling(results, "strong")


def chart(results: Results) -> Chart:
    """Return seconds per sample and device at the smallest node count over those at each, with intervals."""
    return efficiency.build_efficiency_chart(results, "strong")


def figure(results: Results) -> Figure:
    """Draw it for print."""
    return draw_chart(chart(results))
