"""Memory against micro-batch, a curve per engine: the peak of live tensor bytes over steady steps on the worst rank."""

from matplotlib.figure import Figure

from analysis import drawing
from analysis.drawing import panels
from analysis.drawing.curves import Quantity, curves
from analysis.formats.numbers import UNITS, power_of
from analysis.results import Results

TITLE = "Memory by engine and micro-batch"
ALT = "Peak allocated bytes against micro-batch, a curve per engine, a panel per question. The tables hold the numbers."
PLACE = 3


@drawing.styled
def figure(results: Results) -> Figure:
    """Draw the peak allocated memory per rank in the largest binary unit that it fills."""
    peaks = results.summary["peak_allocated_bytes"].dropna()
    power = power_of(float(peaks.max()) if len(peaks) else 0.0)
    peak = Quantity("peak_allocated_bytes", f"peak allocated, {UNITS[power]}", unit=1024**power)
    grid = panels.grid(panels.by_question(results.summary))
    return curves(grid, peak, lambda rows: "Peak over steady steps, on the rank with most.")
