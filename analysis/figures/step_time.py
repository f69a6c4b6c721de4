"""Step time against nodes, a curve per engine, a panel per work that is held equal."""

from matplotlib.figure import Figure

from analysis import plotting
from analysis.plotting import panels
from analysis.plotting.curves import PlottedQuantity, draw_curves
from analysis.results import Results

TITLE = "Step time by stage and nodes"
ALT = (
    "Median step time against nodes, a curve per engine, a panel per micro-batch and work held equal. The tables hold "
    "the numbers."
)
PLACE = 2

_STEP = PlottedQuantity(
    "step_s",
    "s per step, median",
    low="step_s_low",
    high="step_s_high",
    across="nodes",
    across_label="nodes",
)


@plotting.styled
def figure(results: Results) -> Figure:
    """Draw the median time of an optimizer step in seconds, with its interval where one is known."""
    grid = panels.build_grid(panels.group_by_micro(results.summary))
    return draw_curves(grid, _STEP, plotting.format_interval_note)
