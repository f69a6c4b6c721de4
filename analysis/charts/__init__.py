"""What a figure of curves shows, as values that know no drawing library: `analysis.plotting` draws them for print,
`analysis.report` for its page."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from analysis.charts.looks import number_looks
from analysis.summary import Row

_ABOVE, _FURTHEST = 1.08, 1.5  # end of an axis over the highest point, and at most for the sake of intervals


class ChartInterval(NamedTuple):
    """Where a number lies; `kind` names level and kind as a reader is told them."""

    low: float
    high: float
    kind: str


class ChartPoint(NamedTuple):
    """A number in the unit drawn, at the place of that number along x, of a row of the summary."""

    place: int
    value: float
    interval: ChartInterval | None
    row: Row


class ChartGap(NamedTuple):
    """A place without a number; `row` says how its runs ended, None where there was none."""

    place: int
    row: Row | None


class ChartCurve(NamedTuple):
    """A series of one name: points of a segment are joined, and `gaps` are known only of one that failed somewhere.
    What was predicted has the name of what was measured; it is hollow, its line dashed."""

    label: str
    segments: tuple[tuple[ChartPoint, ...], ...]
    gaps: tuple[ChartGap, ...]
    predicted: bool = False

    @property
    def points(self) -> tuple[ChartPoint, ...]:
        return tuple(point for segment in self.segments for point in segment)


class ChartPanel(NamedTuple):
    """Curves over the same places; `title` is in parts that a line may break between, `scale` names its y axis, which
    all panels of the same share."""

    title: tuple[str, ...]
    scale: str
    places: tuple[str, ...]
    curves: tuple[ChartCurve, ...]

    @property
    def points(self) -> tuple[ChartPoint, ...]:
        return tuple(point for curve in self.curves for point in curve.points)

    @property
    def incomplete(self) -> tuple[ChartCurve, ...]:
        """The curves with gaps, a line each of the strip below zero."""
        return tuple(curve for curve in self.curves if curve.gaps)


class Chart(NamedTuple):
    """A figure: panels with a common axis of x and a common quantity, both linear; `note` says how to read it."""

    across: str  # what the places are
    quantity: str
    thousands: bool  # 1200 is written 1.2k
    intervals: bool  # a point without one is hollow
    ideal: float | None  # drawn across every panel
    note: str
    panels: tuple[ChartPanel, ...]

    @property
    def labels(self) -> list[str]:
        """The names of the curves, in the order of a legend."""
        return sorted({curve.label for panel in self.panels for curve in panel.curves})

    @property
    def looks(self) -> dict[str, int]:
        """The number of the look of every curve by its name."""
        return number_looks(self.labels)

    @property
    def interval_kinds(self) -> list[str]:
        """Which intervals are drawn."""
        points = (point for panel in self.panels for point in panel.points)
        return sorted({point.interval.kind for point in points if point.interval and point.interval.kind})

    @property
    def tops(self) -> Mapping[str, float]:
        """The end of every y axis, which begins at zero: above the highest point, and not at the end of an interval so
        wide that it would squeeze all others; 0 of one without a number."""
        return {scale: self._compute_top(points) for scale, points in self._list_points()}

    def _list_points(self) -> Iterator[tuple[str, list[ChartPoint]]]:
        for scale in dict.fromkeys(panel.scale for panel in self.panels):
            yield scale, [point for panel in self.panels if panel.scale == scale for point in panel.points]

    def _compute_top(self, points: list[ChartPoint]) -> float:
        highest = max([self.ideal or 0.0, *(point.value for point in points)])
        reach = max([highest, *(point.interval.high for point in points if point.interval)])
        return _ABOVE * min(reach, _FURTHEST * highest)


def spread_curves(panel: ChartPanel) -> Mapping[str, float]:
    """Return how far beside its place every curve stands: where there is one place alone they stand side by side, and a
    line would lie where nothing was measured; elsewhere at their places."""
    labels, room = [curve.label for curve in panel.curves], 0.5 if len(panel.places) == 1 else 0.0
    return {label: room * ((index + 0.5) / len(labels) - 0.5) for index, label in enumerate(labels)}


_ENDED = {"oom": "OOM", "host_oom": "host OOM"}


def format_reason(row: Row | None) -> str:
    """Say in a word or two why there is no number."""
    if row is None:
        return "not run"
    ended = str(row["outcome"])
    return "unknown" if ended == "ok" else _ENDED.get(ended, ended.replace("_", " "))
