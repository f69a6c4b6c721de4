"""Draws lanes: a row for each, time to the right."""

from collections.abc import Sequence

from matplotlib.axes import Axes

from analysis.charts.lanes import BACKWARD, FORWARD, KINDS, TRANSFER, Lane
from analysis.plotting import COLOURS, INK

LANE_COLOURS = {FORWARD: COLOURS[0], BACKWARD: COLOURS[1], TRANSFER: COLOURS[6]}
"""Forward and backward as in the bars of a step's time."""

_THICK = 0.8
_FEW = 400  # passes that are told apart by their edges
_MOST_LABELS = 16


def draw_lanes(axes: Axes, lanes: Sequence[Lane], size: float) -> None:
    """Draw lanes from above over seconds divided by `size`."""
    edge = 0.4 if sum(len(lane.spans) for lane in lanes) <= _FEW else 0.0
    for row, lane in enumerate(lanes):
        for kind in KINDS:
            spans = [
                (span.begin_s / size, (span.end_s - span.begin_s) / size) for span in lane.spans if span.kind == kind
            ]
            if spans:
                axes.broken_barh(
                    spans, (row - _THICK / 2, _THICK), facecolor=LANE_COLOURS[kind], edgecolor=INK, linewidth=edge,
                    gid=f"{kind.replace(' ', '-')}-{row}",
                )  # fmt: skip
    every = -(-len(lanes) // _MOST_LABELS)
    axes.set_yticks(range(0, len(lanes), every), [lane.label for lane in lanes[::every]])
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(0, max(lane.spans[-1].end_s for lane in lanes) / size)
    axes.grid(visible=False)
