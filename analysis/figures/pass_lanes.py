"""What each rank of a pipeline did when, measured in one step, above what its schedule says."""

from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from analysis import plotting
from analysis.charts import groups
from analysis.charts.lanes import (
    BACKWARD,
    FORWARD,
    Lane,
    build_lanes,
    build_timed_lanes,
    compute_busy,
    compute_idle,
    scale_to,
)
from analysis.plotting.lanes import LANE_COLOURS, draw_lanes
from analysis.results import Results
from bench.errors import UserError
from bench.predict.step_time.pipeline import play_passes_by_flops
from bench.record import RunRecord

TITLE = "What each rank did when"
ALT = (
    "A lane for each place of a pipeline, with the forwards and backwards of one step as measured, and below the same "
    "step as its schedule says. The tables hold the numbers."
)
PLACE = 7

_NOTE = (
    "One untimed step, of the first rank in each place; seconds from the begin of its own step, which ranks begin "
    "nearly together. Empty: it waits, for a pass or a transfer. By its schedule: the same passes where stages take as "
    "long as their FLOPs, transfers no time, and all passes together as long as measured."
)
_MOST = 4  # runs
_WIDTH_IN, _LANE_IN, _AROUND_IN, _LEGEND_IN = 7.2, 0.2, 0.75, 0.7
_MOST_LANES, _LETTERS = 16, 90  # lanes that have their height, and of a title


class LanePair(NamedTuple):
    """A run: its lanes as measured, and as its schedule says; none where that cannot be said any more."""

    measured: list[Lane]
    expected: list[Lane]


def applies(results: Results) -> bool:
    """Whether the record of a run holds passes."""
    return bool(_find_pairs(results, 1))


@plotting.styled
def figure(results: Results) -> Figure:
    """Draw the last run of each configuration, the first ones where they are many."""
    found = _find_pairs(results, _MOST)
    names = [" · ".join(words) for words in groups.describe_runs(results, list(found))]
    heights = [_AROUND_IN + _LANE_IN * min(len(pair.measured), _MOST_LANES) for pair in found.values()]
    drawn = Figure(figsize=(_WIDTH_IN, _LEGEND_IN + 2 * sum(heights)), layout="constrained")
    all_axes = drawn.subplots(
        2 * len(found), 1, squeeze=False, height_ratios=[one for one in heights for _ in range(2)]
    )
    for place, (name, pair) in enumerate(zip(names, found.values(), strict=True)):
        end_s = max(lane.spans[-1].end_s for lane in (*pair.measured, *pair.expected))
        size, unit = (1.0, "s") if end_s >= 0.1 else (1e-3, "ms")
        for row, (what, lanes) in enumerate(zip(("measured", "by its schedule"), pair, strict=True)):
            axes = all_axes[2 * place + row][0]
            if not lanes:
                axes.set_axis_off()
                continue
            draw_lanes(axes, lanes, size)
            axes.set_xlim(0, end_s / size)
            share = f"{what}, {100 * compute_idle(lanes):.0f} % without a pass"
            axes.set_title(share if row else plotting.shorten_text(f"{share}: {name}", _LETTERS))
            axes.set_xlabel(f"{unit} from the begin of the step" if row else "")
    keys = [Patch(facecolor=LANE_COLOURS[kind], label=kind) for kind in (FORWARD, BACKWARD)]
    plotting.draw_legend(drawn, keys, _NOTE)
    return drawn


def build_pair(record: RunRecord) -> LanePair | None:
    """Return the lanes of a run; None where its record holds no passes."""
    observed, spec = record.observations, record.spec
    if observed is None or not observed.passes or not all(observed.passes):
        return None
    apart = spec.world_size // spec.parallel.pipeline
    measured = build_timed_lanes(observed.passes, apart)
    try:
        played = build_lanes(play_passes_by_flops(spec), apart)
    except (UserError, ValueError):  # a family, a shape or an option that this version does not know
        played = []
    return LanePair(measured, scale_to(played, compute_busy(measured)) if played else [])


def _find_pairs(results: Results, most: int) -> dict[int, LanePair]:
    """Return of at most so many configurations the lanes of their last run, by its row in the table."""
    table: pd.DataFrame = results.table.reset_index(drop=True)
    waited = table[(table["outcome"] == "ok") & table["idle_share"].notna()]
    found: dict[int, LanePair] = {}
    for place in waited.drop_duplicates("config_id", keep="last").index:
        if len(found) < most and (pair := build_pair(results.record(int(place)))):
            found[int(place)] = pair
    return found
