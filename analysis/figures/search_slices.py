"""The trials of a search against each field alone."""

from matplotlib.figure import Figure

from analysis.charts import searches
from analysis.charts.scatter import ScatterChart
from analysis.plotting.scatter import draw_scatter
from analysis.results import Results

TITLE = "Each field alone"
ALT = "A point per trial over the values of each field."
PLACE = 22


def applies(results: Results) -> bool:
    """Whether a field of a search took several values."""
    return bool(results.searches and chart(results).panels)


def chart(results: Results) -> ScatterChart:
    """Return what is drawn."""
    return searches.build_slices(results.searches)


def figure(results: Results) -> Figure:
    """Draw it for print."""
    return draw_scatter(chart(results))
