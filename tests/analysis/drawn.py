"""What stands in a drawn figure, read off its axes."""

from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import plotting


def points(axes: Axes) -> list[tuple[float, float]]:
    """Where numbers are drawn."""
    marked = [line for line in axes.lines if line.get_marker() != "None" and line.get_gid() != "strip"]
    return sorted(point for line in marked for point in zip(line.get_xdata(), line.get_ydata(), strict=True))


def joins(axes: Axes) -> list[Line2D]:
    """The lines between points."""
    return [line for line in axes.lines if line.get_marker() == "None" and line.get_color() != plotting.INK]


def intervals(axes: Axes) -> list[tuple[float, float]]:
    """The ends of the vertical bars, from left to right."""
    segments = [segment for bar in axes.collections for segment in bar.get_segments()]
    return [tuple(sorted(segment[:, 1])) for segment in sorted(segments, key=lambda segment: segment[0, 0])]


def places(axes: Axes) -> list[str]:
    """What stands below the axis."""
    return [label.get_text() for label in axes.get_xticklabels()]


def reasons(axes: Axes) -> set[tuple[str, str, str]]:
    """What the strip below zero says: text, place, colour."""
    for text in axes.texts:
        assert axes.get_ylim()[0] < text.get_position()[1] < 0
    names = places(axes) or [axes.get_xlabel().split()[-1]]  # a single value has no tick
    return {(t.get_text(), names[round(t.get_position()[0])], to_hex(t.get_color()).upper()) for t in axes.texts}


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def titles(figure: Figure) -> list[str]:
    """The titles in one line each."""
    return [axes.get_title(loc="left").replace("\n", " · ") for axes in figure.axes]


def note(figure: Figure) -> str:
    return " ".join(figure.get_supxlabel().split())
