"""What the ranks of a pipeline do when: a lane for each, of passes and of what they wait for."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from bench.engine_costs import PlayedPass
    from bench.record import TimedPass

FORWARD, BACKWARD, TRANSFER = "forward", "backward", "waits for a transfer"
KINDS = (FORWARD, BACKWARD, TRANSFER)
"""Of spans, in the order of a key; a lane is empty where its rank waits for another one's pass."""


class LaneSpan(NamedTuple):
    """What a rank does for a while, in seconds from the begin of a step's passes."""

    kind: str
    begin_s: float
    end_s: float


class Lane(NamedTuple):
    """One rank, or those that do the same at the same time."""

    label: str
    spans: tuple[LaneSpan, ...]


def build_lanes(passes: "Sequence[PlayedPass]", ranks_per_place: int) -> list[Lane]:
    """Return the lanes of passes, those of a place in their order: before each the part of the wait in which what it
    takes up is on its way."""
    spans: dict[int, list[LaneSpan]] = {}
    for kind, _, place, begin_s, end_s, sent_s in passes:
        lane = spans.setdefault(place, [])
        free_s = lane[-1].end_s if lane else 0.0
        if sent_s is not None and max(free_s, sent_s) < begin_s:
            lane.append(LaneSpan(TRANSFER, max(free_s, sent_s), begin_s))
        lane.append(LaneSpan(kind, begin_s, end_s))
    return [Lane(_name_ranks(place * ranks_per_place, ranks_per_place), tuple(spans[place])) for place in sorted(spans)]


def build_timed_lanes(passes: "Sequence[Sequence[TimedPass]]", ranks_per_place: int) -> list[Lane]:
    """Return the lanes of measured passes, by place. What was on its way when is not known."""
    return [
        Lane(_name_ranks(place * ranks_per_place, 1), tuple(LaneSpan(one.kind, one.begin_s, one.end_s) for one in here))
        for place, here in enumerate(passes)
    ]


def scale_to(lanes: Sequence[Lane], busy_s: float) -> list[Lane]:
    """Return lanes in another unit of time: all their passes together take so many seconds."""
    factor = busy_s / compute_busy(lanes)
    return [
        lane._replace(spans=tuple(LaneSpan(kind, factor * begin, factor * end) for kind, begin, end in lane.spans))
        for lane in lanes
    ]


def compute_busy(lanes: Sequence[Lane]) -> float:
    """Return how long all passes take together."""
    return sum(span.end_s - span.begin_s for lane in lanes for span in lane.spans if span.kind != TRANSFER)


def compute_idle(lanes: Sequence[Lane]) -> float:
    """Return the part of the passes' time in which a lane makes none, mean over lanes."""
    end_s = max(lane.spans[-1].end_s for lane in lanes)
    return 1 - compute_busy(lanes) / (end_s * len(lanes))


def _name_ranks(first: int, number: int) -> str:
    return f"rank {first}" if number == 1 else f"ranks {first}–{first + number - 1}"
