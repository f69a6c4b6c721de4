"""Figure of a pipeline's timeline in one step: as measured, and below it as simulated from the schedule."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes

from analysis.drawing import Panel, Picture, Space, groups
from analysis.drawing.lanes import (
    KEYS,
    Lane,
    build_lanes,
    build_timed_lanes,
    compute_busy,
    compute_idle,
    draw_lanes,
    scale_to,
)
from analysis.results import Results
from bench.core.errors import UserError
from bench.core.record import RunRecord
from bench.predict.step_time.pipeline import play_passes_by_flops

TITLE = "Pipeline timeline of one step"
ALT = "Forward and backward passes of each pipeline rank over time, as measured and as simulated."
NEEDS = "runs of pipelines with recorded forward and backward passes"
PLACE = 7

_NOTE = (
    "Measured: one untimed step; of the ranks with the same layers, the first rank is shown. The step begins almost "
    "simultaneously on all ranks. Empty: the rank waits. Simulated: the same passes by the engine's schedule. The "
    "simulation assumes that the time of a stage is proportional to its FLOPs, and that transfers take no time. The "
    "total time of all passes is set to the measured total."
)
_MOST = 4  # runs
_LANE_IN, _MOST_LANES = 0.2, 16  # height of a lane; more lanes share the height of this number


class LanePair(NamedTuple):
    """Lanes (timelines of ranks) of a run: measured, and simulated from the schedule (`expected`). The simulated lanes
    are empty if this version of zeroscale cannot simulate the run."""

    measured: list[Lane]
    expected: list[Lane]


def picture(results: Results) -> Picture:
    """Return two panels, measured and simulated, for the last run of each configuration. Only the first configurations
    are shown if there are many."""
    found = _find_pairs(results, _MOST)
    names = groups.describe_runs(results, list(found))
    panels = []
    for name, pair in zip(names, found.values(), strict=True):
        # Measured and simulated lanes have the same time axis; otherwise a difference in length would not be visible.
        end_s = max(lane.spans[-1].end_s for lane in (*pair.measured, *pair.expected))
        for what, lanes in (("measured", pair.measured), ("simulated", pair.expected)):
            if lanes:
                space = Space(_LANE_IN * min(len(lanes), _MOST_LANES) + 0.1, 0.8)
                title = [f"{what}, {100 * compute_idle(lanes):.0f} % idle", *name]
                draw = partial(_draw_lanes, lanes=lanes, end_s=end_s)
                panels.append(Panel(title=title, draw=draw, space=space, wide=True))
    return Picture(panels, KEYS[:2], _NOTE)


def _draw_lanes(axes: Axes, lanes: Sequence[Lane], end_s: float) -> None:
    size, unit = (1.0, "s") if end_s >= 0.1 else (1e-3, "ms")
    draw_lanes(axes, lanes, size)
    axes.set_xlim(0, end_s / size)
    axes.set_xlabel(f"{unit} since the beginning of the step")


def build_pair(record: RunRecord) -> LanePair | None:
    """Return measured and simulated lanes (timelines of ranks) of a run; None if its record has no timed passes."""
    observed, spec = record.observations, record.spec
    if observed is None or not observed.passes or not all(observed.passes):
        return None
    # Ranks that hold the same layers do the same at the same time, so they share one lane.
    apart = spec.world_size // spec.parallel.pipeline
    measured = build_timed_lanes(observed.passes, apart)
    try:
        played = build_lanes(play_passes_by_flops(spec), apart)
    except (UserError, ValueError):  # this version does not know the family, shape or option
        played = []
    return LanePair(measured, scale_to(played, compute_busy(measured)) if played else [])


def _find_pairs(results: Results, most: int) -> dict[int, LanePair]:
    """Return the lanes (timelines of ranks) of the last run of each configuration, for at most `most` configurations.
    Keys are row indices of the run table."""
    table: pd.DataFrame = results.table.reset_index(drop=True)
    waited = table[(table["outcome"] == "ok") & table["idle_share"].notna()]
    found: dict[int, LanePair] = {}
    for place in waited.drop_duplicates("config_id", keep="last").index:
        if len(found) < most and (pair := build_pair(results.record(int(place)))):
            found[int(place)] = pair
    return found
