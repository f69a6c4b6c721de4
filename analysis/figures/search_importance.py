"""What mattered in a search: the part of the objective's variance that each field explains."""

from matplotlib.figure import Figure

from analysis.charts import searches
from analysis.charts.scatter import ScatterChart
from analysis.plotting.scatter import draw_scatter
from analysis.results import Results

TITLE = "What mattered"
ALT = "By field the part of the variance of the objective's logarithm that it explains alone, with an interval."
PLACE = 21


def applies(results: Results) -> bool:
    """Whether a search has enough trials with an answer."""
    return bool(results.searches and chart(results).panels)


def chart(results: Results) -> ScatterChart:
    """Return what is drawn."""
    return searches.build_importance(results.searches)


def figure(results: Results) -> Figure:
    """Draw it for print."""
    return draw_scatter(chart(results))
