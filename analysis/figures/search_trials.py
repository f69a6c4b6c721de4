"""The trials of a search, each a line through its values."""

from matplotlib.figure import Figure

from analysis.charts import searches
from analysis.charts.scatter import ScatterChart
from analysis.plotting.scatter import draw_scatter
from analysis.results import Results

TITLE = "All trials"
ALT = "A line per trial through the values of all fields; those of the best tenth are marked."
PLACE = 23


def applies(results: Results) -> bool:
    """Whether several fields of a search took several values."""
    return bool(results.searches and chart(results).panels)


def chart(results: Results) -> ScatterChart:
    """Return what is drawn."""
    return searches.build_parallel(results.searches)


def figure(results: Results) -> Figure:
    """Draw it for print."""
    return draw_scatter(chart(results))
