"""Throughput against micro-batch, a curve per engine, until memory ends it."""

from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from analysis import plotting
from analysis.plotting import panels
from analysis.plotting.curves import PlottedQuantity, draw_curves
from analysis.results import Results

TITLE = "Throughput by micro-batch"
ALT = "Tokens per second against micro-batch, a curve per engine, a panel per question. The tables hold the numbers."
PLACE = 1

_RATE = PlottedQuantity(
    "tokens_per_s",
    "tokens/s, padding included",
    low="tokens_per_s_low",
    high="tokens_per_s_high",
    formatter=lambda: EngFormatter(sep=""),
)


@plotting.styled
def figure(results: Results) -> Figure:
    """Draw tokens/s over all ranks, all kinds with padding, with intervals where they are known."""
    grid = panels.build_grid(panels.group_by_question(results.summary))
    return draw_curves(grid, _RATE, plotting.format_interval_note)
