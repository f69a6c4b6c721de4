"""Draws a chart of points and lines for print."""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import plotting
from analysis.charts.looks import choose_colour
from analysis.charts.scatter import ScatterChart, ScatterPanel
from analysis.plotting import panels

_MANY = 4  # named places from which on their names stand aslant


@plotting.styled
def draw_scatter(chart: ScatterChart) -> Figure:
    """Draw all panels, with one legend above them."""
    figure, axes = panels.build_empty_panels(len(chart.panels))
    for one, panel in zip(axes, chart.panels, strict=True):
        panels.draw_title(one, (panel.title,))
        _draw_panel(one, panel)
    plotting.draw_legend(
        figure, [plotting.build_legend_entry(label, look) for label, look in chart.keys.items()], chart.note
    )
    return figure


def _draw_panel(axes: Axes, panel: ScatterPanel) -> None:
    for series in panel.series:
        colour = choose_colour(series.look)
        x, y = [point.x for point in series.points], [point.y for point in series.points]
        if series.joined:
            axes.plot(x, y, color=colour, linewidth=1.0, zorder=2)
            continue
        axes.plot(x, y, **plotting.choose_marker_style(series.look), alpha=0.75, zorder=3)
        if bars := [(point.x, *point.ends) for point in series.points if point.ends]:
            axes.vlines(*zip(*bars, strict=True), color=colour, linewidth=0.9)
    if panel.places:
        aslant = len(panel.places) >= _MANY
        axes.set_xticks(
            range(len(panel.places)),
            [plotting.shorten_text(name, 28) for name in panel.places],
            rotation=30 if aslant else 0,
            ha="right" if aslant else "center",
        )
        axes.set_xlim(-0.5, len(panel.places) - 0.5)
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(panel.across)
    axes.set_ylabel(panel.up)
