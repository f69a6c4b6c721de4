"""Throughput against micro-batch, a curve per engine, until memory ends it."""

from matplotlib.figure import Figure

from analysis.charts import Chart, groups
from analysis.charts.curves import PlottedQuantity, build_chart
from analysis.plotting.charts import draw_chart
from analysis.results import Results

TITLE = "Throughput by micro-batch"
ALT = "Tokens per second against micro-batch, a curve per engine, a panel per question. The tables hold the numbers."
PLACE = 1

_QUANTITY = PlottedQuantity("tokens_per_s", "tokens/s, padding included", thousands=True)


def chart(results: Results) -> Chart:
    """Return tokens/s over all ranks, all kinds with padding, with intervals where they are known."""
    return build_chart(groups.group_by_question(results.summary), _QUANTITY)


def figure(results: Results) -> Figure:
    """Draw it for print."""
    return draw_chart(chart(results))
