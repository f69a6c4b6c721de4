"""Step time against nodes, a curve per engine, a panel per work that is held equal."""

from matplotlib.figure import Figure

from analysis.charts import Chart, groups
from analysis.charts.curves import PlottedQuantity, build_chart
from analysis.plotting.charts import draw_chart
from analysis.results import Results

TITLE = "Step time by stage and nodes"
ALT = (
    "Median step time against nodes, a curve per engine, a panel per micro-batch and work held equal. The tables hold "
    "the numbers."
)
PLACE = 2

_QUANTITY = PlottedQuantity("step_s", "s per step, median", across="nodes", across_label="nodes")


def chart(results: Results) -> Chart:
    """Return the median time of an optimizer step in seconds, with its interval where one is known."""
    return build_chart(groups.group_by_micro(results.summary), _QUANTITY)


def figure(results: Results) -> Figure:
    """Draw it for print."""
    return draw_chart(chart(results))
