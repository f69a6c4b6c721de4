"""Throughput against micro-batch, a curve per engine, until memory ends it."""

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from analysis import drawing
from analysis.drawing import panels
from analysis.drawing.curves import Quantity, curves
from analysis.results import Results

TITLE = "Throughput by micro-batch"
ALT = "Tokens per second against micro-batch, a curve per engine, a panel per question. The tables hold the numbers."
PLACE = 1

_RATE = Quantity(
    "tokens_per_s",
    "tokens/s, padding included",
    low="tokens_per_s_low",
    high="tokens_per_s_high",
    formatter=lambda: EngFormatter(sep=""),
    alike=("model", "nodes", "devices_per_node"),  # more ranks are another scale
)


@drawing.styled
def figure(results: Results) -> Figure:
    """Draw tokens/s over all ranks, all kinds with padding, with intervals where they are known."""
    grid = panels.grid(panels.by_question(results.summary))
    return curves(grid, _RATE, drawing.interval_note)
