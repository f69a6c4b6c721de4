"""Memory against micro-batch, a curve per engine: the peak of live tensor bytes over steady steps on the worst rank."""

from matplotlib.figure import Figure

from analysis import plotting
from analysis.formats.numbers import UNITS, find_unit_power
from analysis.plotting import panels
from analysis.plotting.curves import PlottedQuantity, draw_curves
from analysis.results import Results

TITLE = "Memory by engine and micro-batch"
ALT = "Peak allocated bytes against micro-batch, a curve per engine, a panel per question. The tables hold the numbers."
PLACE = 3


@plotting.styled
def figure(results: Results) -> Figure:
    """Draw the peak allocated memory per rank in the largest binary unit that it fills."""
    peaks = results.summary["peak_allocated_bytes"].dropna()
    power = find_unit_power(float(peaks.max()) if len(peaks) else 0.0)
    peak = PlottedQuantity("peak_allocated_bytes", f"peak allocated, {UNITS[power]}", unit=1024**power)
    grid = panels.build_grid(panels.group_by_question(results.summary))
    return draw_curves(grid, peak, lambda rows: "Peak over steady steps, on the rank with most.")
