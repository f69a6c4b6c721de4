"""Time, memory and cost of a search's trials, and what none beats in both."""

from matplotlib.figure import Figure

from analysis.charts import searches
from analysis.charts.scatter import ScatterChart
from analysis.plotting.scatter import draw_scatter
from analysis.results import Results

TITLE = "Time, memory and cost"
ALT = (
    "A point per trial: seconds per sample against peak memory and against node-seconds; a line joins what nothing "
    "beats in both."
)
PLACE = 24


def applies(results: Results) -> bool:
    """Whether two trials of a search were measured."""
    return bool(results.searches and chart(results).panels)


def chart(results: Results) -> ScatterChart:
    """Return what is drawn."""
    return searches.build_front(results.searches)


def figure(results: Results) -> Figure:
    """Draw it for print."""
    return draw_scatter(chart(results))
