"""Helpers that read the contents of a drawn figure from its axes."""

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis.drawing import INK, compose
from analysis.results import Results

POINT_ORDER = 3  # drawing order of markers that show a number; markers below zero and arrows have other orders


def draw(module: Any, found: Results) -> Figure:
    """Return the figure of a module in `analysis.figures`, in its version for print, drawn from the results `found`."""
    return compose(module.picture(found))


def shows(module: Any, found: Results) -> bool:
    """Return True if the module's figure has at least one panel for the results `found`."""
    return bool(module.picture(found).panels)


def points(axes: Axes) -> list[tuple[float, float]]:
    """Return x and y of all points that show a number, sorted. Markers for failures and arrows are not included."""
    marked = [line for line in axes.lines if line.get_zorder() == POINT_ORDER]
    return sorted(point for line in marked for point in zip(line.get_xdata(), line.get_ydata(), strict=True))


def joins(axes: Axes) -> list[Line2D]:
    """Return the lines that join the points of a curve."""
    return [line for line in axes.lines if line.get_marker() == "None" and line.get_color() != INK]


def intervals(axes: Axes) -> list[tuple[float, float]]:
    """Return the lower and upper ends of the interval bars, from left to right."""
    segments = [segment for bar in axes.collections for segment in bar.get_segments()]
    return [tuple(sorted(segment[:, 1])) for segment in sorted(segments, key=lambda segment: segment[0, 0])]


def places(axes: Axes) -> list[str]:
    """Return the tick labels of the x axis."""
    return [label.get_text() for label in axes.get_xticklabels()]


def strip(axes: Axes) -> list[Line2D]:
    """Return the markers of failed configurations in the strip below y = 0, from top to bottom. Each marker begins a
    line of text."""
    return [line for line in axes.lines if line.get_marker() != "None" and line.get_ydata()[0] < 0]


def reasons(axes: Axes) -> set[tuple[str, str]]:
    """Return the texts in the strip below y = 0, such as `OOM`, each with the tick label above it."""
    for text in axes.texts:
        assert axes.get_ylim()[0] < text.get_position()[1] < 0
    single = axes.get_xlabel().split()[-1]  # with a single tick, the axis shows the names of the series
    names = [single] if single.isdigit() else places(axes)
    return {(text.get_text(), names[round(text.get_position()[0])]) for text in axes.texts}


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def titles(figure: Figure) -> list[str]:
    """Return the titles of all panels, each as one line."""
    return [axes.get_title(loc="left").replace("\n", " · ") for axes in figure.axes]


def note(figure: Figure) -> str:
    return " ".join(" ".join(text.get_text() for text in figure.texts if text.get_gid() == "note").split())
