"""Step time against nodes, a curve per engine, a panel per work that is held equal."""

from matplotlib.figure import Figure

from analysis import drawing
from analysis.drawing import panels
from analysis.drawing.curves import Quantity, curves
from analysis.results import Results

TITLE = "Step time by stage and nodes"
ALT = (
    "Median step time against nodes, a curve per engine, a panel per micro-batch and work held equal. The tables hold "
    "the numbers."
)
PLACE = 2

_STEP = Quantity(
    "step_s",
    "s per step, median",
    low="step_s_low",
    high="step_s_high",
    alike=("model", "micro"),  # another micro-batch is other work
    across="nodes",
    across_label="nodes",
)


@drawing.styled
def figure(results: Results) -> Figure:
    """Draw the median time of an optimizer step in seconds, with its interval where one is known."""
    grid = panels.grid(panels.by_micro(results.summary))
    return curves(grid, _STEP, drawing.interval_note)
