"""How a search went: its trials, and the best so far."""

from matplotlib.figure import Figure

from analysis.charts import searches
from analysis.charts.scatter import ScatterChart
from analysis.plotting.scatter import draw_scatter
from analysis.results import Results

TITLE = "How the search went"
ALT = "A point per trial and a line for the best so far, against trials and against node-hours."
PLACE = 20


def applies(results: Results) -> bool:
    """Whether there is a search."""
    return bool(results.searches and chart(results).panels)


def chart(results: Results) -> ScatterChart:
    """Return what is drawn."""
    return searches.build_history(results.searches)


def figure(results: Results) -> Figure:
    """Draw it for print."""
    return draw_scatter(chart(results))
