"""Timelines of a pipeline. Each rank has a row (lane) with its passes and its waits for transfers; time runs to the
right."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path

from analysis.drawing import COLOURS, INK, Key, mark

if TYPE_CHECKING:
    from bench.core.engine_costs import SimulatedPass
    from bench.core.record import TimedPass

FORWARD, BACKWARD, TRANSFER = "forward", "backward", "waits for a transfer"
KEYS = tuple(
    Key(kind, {"facecolor": colour}, patch=True)
    for kind, colour in ((FORWARD, COLOURS[0]), (BACKWARD, COLOURS[1]), (TRANSFER, COLOURS[6]))
)
"""Legend of the kinds of spans in a lane. A lane is empty while its rank waits for a pass of another rank."""

_THICK, _BOX = 0.8, [Path.MOVETO, Path.LINETO, Path.LINETO, Path.LINETO, Path.CLOSEPOLY]
_FEW = 400  # passes up to which each has an edge
_MOST_LABELS = 16


class LaneSpan(NamedTuple):
    """A pass or a wait of a rank. Begin and end are in seconds since the first pass of the step began."""

    kind: str
    begin_s: float
    end_s: float


class Lane(NamedTuple):
    """Timeline of one rank, or of several ranks that do the same at the same time."""

    label: str
    spans: tuple[LaneSpan, ...]


def build_lanes(passes: "Sequence[SimulatedPass]", ranks_per_place: int) -> list[Lane]:
    """Return the lanes of simulated passes. Each group of `ranks_per_place` ranks holds the same layers and has one
    lane.

    If a rank waits for an input that has already been sent, the wait is drawn as a transfer.
    """
    spans: dict[int, list[LaneSpan]] = {}
    # `passes` are sorted by their begin, so the last span of a lane ends before the next pass of this lane begins.
    for kind, _, place, begin_s, end_s, sent_s in passes:
        lane = spans.setdefault(place, [])
        free_s = lane[-1].end_s if lane else 0.0
        if sent_s is not None and max(free_s, sent_s) < begin_s:
            lane.append(LaneSpan(TRANSFER, max(free_s, sent_s), begin_s))
        lane.append(LaneSpan(kind, begin_s, end_s))
    return [Lane(_name_ranks(place * ranks_per_place, ranks_per_place), tuple(spans[place])) for place in sorted(spans)]


def build_timed_lanes(passes: "Sequence[Sequence[TimedPass]]", ranks_per_place: int) -> list[Lane]:
    """Return the lanes of measured passes. Each group of `ranks_per_place` ranks holds the same layers and has one
    lane. The lane shows the passes of the group's first rank. Transfers were not measured, so none are drawn."""
    return [
        Lane(_name_ranks(place * ranks_per_place, 1), tuple(LaneSpan(one.kind, one.begin_s, one.end_s) for one in here))
        for place, here in enumerate(passes)
    ]


def scale_to(lanes: Sequence[Lane], busy_s: float) -> list[Lane]:
    """Return the lanes with all times multiplied by the same factor, so that the total duration of all passes is
    `busy_s` seconds."""
    factor = busy_s / compute_busy(lanes)
    return [
        lane._replace(spans=tuple(LaneSpan(kind, factor * begin, factor * end) for kind, begin, end in lane.spans))
        for lane in lanes
    ]


def compute_busy(lanes: Sequence[Lane]) -> float:
    """Return the total duration of all passes in seconds."""
    return sum(span.end_s - span.begin_s for lane in lanes for span in lane.spans if span.kind != TRANSFER)


def compute_idle(lanes: Sequence[Lane]) -> float:
    """Return the fraction of the timeline in which a rank runs no forward or backward pass, averaged over the lanes. A
    lane is the row of the timeline for one rank, or for several ranks that do the same."""
    end_s = max(lane.spans[-1].end_s for lane in lanes)
    return 1 - compute_busy(lanes) / (end_s * len(lanes))


def _name_ranks(first: int, number: int) -> str:
    return f"rank {first}" if number == 1 else f"ranks {first}–{first + number - 1}"


def draw_lanes(axes: Axes, lanes: Sequence[Lane], size: float) -> None:
    """Draw lanes from top to bottom. `size` is the unit of the time axis in seconds."""
    edge = 0.4 if sum(len(lane.spans) for lane in lanes) <= _FEW else 0.0
    for row, lane in enumerate(lanes):
        for key in KEYS:
            spans = [(one.begin_s / size, one.end_s / size) for one in lane.spans if one.kind == key.label]
            if spans:  # as one path: separate boxes would make a page twice as large
                low, high = row - _THICK / 2, row + _THICK / 2
                corners = [[(x0, low), (x1, low), (x1, high), (x0, high), (x0, low)] for x0, x1 in spans]
                boxes = Path([corner for box in corners for corner in box], _BOX * len(spans))
                mark(axes.add_patch(PathPatch(boxes, edgecolor=INK, linewidth=edge, **key.style)), key.label)
    every = -(-len(lanes) // _MOST_LABELS)  # rounded up: with more lanes, only every second, third … has a label
    axes.set_yticks(range(0, len(lanes), every), [lane.label for lane in lanes[::every]])
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(0, max(lane.spans[-1].end_s for lane in lanes) / size)
    axes.grid(visible=False)
