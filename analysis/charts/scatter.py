"""A figure of points and lines over two axes of numbers, or of a few named places, as values that know no drawing
library."""

from collections.abc import Sequence
from typing import NamedTuple


class ScatterPoint(NamedTuple):
    """`words` say what a point is; `ends` are those of its interval along y."""

    x: float
    y: float
    words: str = ""
    ends: tuple[float, float] | None = None


class ScatterSeries(NamedTuple):
    """Points of one look; `joined` ones have lines between them and no marks."""

    label: str
    look: int
    points: tuple[ScatterPoint, ...]
    joined: bool = False


class ScatterPanel(NamedTuple):
    """Series over common axes; `places` name the whole numbers along x from 0 on, empty where x is a number."""

    title: str
    across: str
    up: str
    series: tuple[ScatterSeries, ...]
    places: tuple[str, ...] = ()
    from_zero: bool = False  # whether y begins at 0


class ScatterChart(NamedTuple):
    """Panels side by side; `note` says how to read them."""

    panels: tuple[ScatterPanel, ...]
    note: str

    @property
    def keys(self) -> dict[str, int]:
        """The look of every series by its label."""
        return {series.label: series.look for panel in self.panels for series in panel.series if series.label}


def join_points(pairs: Sequence[tuple[float, float]]) -> tuple[ScatterPoint, ...]:
    """Return the points of a line."""
    return tuple(ScatterPoint(x, y) for x, y in pairs)
