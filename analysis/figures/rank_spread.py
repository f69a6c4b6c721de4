"""How alike the ranks of a run are: each one's own time in a step, outside its collectives, and its memory."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from analysis import plotting
from analysis.charts import groups
from analysis.flags import NO_MEASUREMENT
from analysis.formats import UNITS, find_unit_power
from analysis.observed import list_by_rank, list_own_seconds
from analysis.results import Results
from bench.record import RunRecord
from bench.stragglers import compare_to_alike, find_slow_ranks

TITLE = "Spread over ranks"
ALT = (
    "A line per run, a tick per rank: its own time in a step outside collectives over the median rank's, and its peak "
    "memory less the median rank's, in a pipeline of the same part of the layers. The tables hold the numbers."
)
PLACE = 8

_NOTE = (
    "Ticks: ranks. Own time is of one untimed step, so it has no interval. Marked: ranks that the others wait for, "
    "more than 20 % and 20 ms slower than the others' median. Medians are of ranks with the same part of the layers."
)
_MOST, _LETTERS = 20, 44  # lines, and of what they are called
_WIDTH_IN, _LINE_IN, _AROUND_IN = 7.2, 0.32, 1.2
_TICK: Any = {"color": plotting.COLOURS[0], "marker": "|", "markersize": 7, "markeredgewidth": 1.1, "linestyle": "none"}
_SLOW: Any = {"color": plotting.COLOURS[4], "marker": "D", "markersize": 4, "linestyle": "none"}


class RankSpread(NamedTuple):
    """One run: by rank, seconds of its own and peak bytes, each empty unless all ranks' are known."""

    own_s: Sequence[float]
    peak_bytes: Sequence[int]
    parts: int  # of the layers; ranks with the same one are compared


def applies(results: Results) -> bool:
    """Whether a run of several ranks tells of each."""
    return bool(_find_telling_rows(results.table).any())


@plotting.styled
def figure(results: Results) -> Figure:
    """Draw the runs with the largest spread, of every configuration the one whose ranks differ most."""
    most, number = _select_most_spread(results.table)
    shown = [_read_rank_spread(results.record(place)) for place in most]
    drawn = Figure(figsize=(_WIDTH_IN, _AROUND_IN + _LINE_IN * len(shown)), layout="constrained")
    left, right = drawn.subplots(1, 2, sharey=True)
    _draw_own_times(left, shown)
    _draw_memory(right, shown)
    labels = [
        "\n".join(plotting.shorten_text(word, _LETTERS) for word in parts)
        for parts in groups.describe_runs(results, most)
    ]
    left.set_yticks(range(len(labels)), labels)
    left.set_ylim(len(labels) - 0.4, -0.6)
    keys = [Line2D([], [], label="a rank", **_TICK), Line2D([], [], label="a slow rank, by its number", **_SLOW)]
    plotting.draw_legend(
        drawn, keys, _NOTE, groups.describe_omitted(number, "configurations", "smallest spread", _MOST)
    )
    return drawn


def _find_telling_rows(table: pd.DataFrame) -> "pd.Series[bool]":
    """Which rows of the run table ended ok, are measurements, and tell of several ranks."""
    known = table["slowest_over_median"].notna() | table["peak_allocated_spread_bytes"].notna()
    return (table["outcome"] == "ok") & ~table["flags"].str.contains("|".join(NO_MEASUREMENT)) & known


def _select_most_spread(table: pd.DataFrame) -> tuple[list[int], int]:
    """Return rows of the run table, of every configuration the one whose ranks differ most, the worst first and at most
    _MOST; and how many configurations there are."""
    known_rows = table.reset_index(drop=True)[_find_telling_rows(table).to_numpy(bool)]
    worst = known_rows.sort_values(
        ["slowest_over_median", "peak_allocated_spread_bytes"], ascending=False, kind="stable"
    )
    places = worst.drop_duplicates("config_id").index
    return [int(place) for place in places[:_MOST]], len(places)


def _read_rank_spread(record: RunRecord) -> RankSpread:
    peaks = list_by_rank(record, "peak_allocated_bytes")
    complete = len(peaks) == record.spec.world_size
    return RankSpread(list_own_seconds(record), peaks if complete else (), record.spec.parallel.pipeline)


def _draw_own_times(axes: Axes, shown: Sequence[RankSpread]) -> None:
    for y, run in enumerate(shown):
        if not run.own_s:
            _draw_unknown(axes, y)
            continue
        slow = find_slow_ranks(run.own_s, run.parts)
        for rank, (own, usual) in enumerate(compare_to_alike(run.own_s, run.parts)):
            axes.plot(own / usual, y, **(_SLOW if rank in slow else _TICK))
            if rank in slow:
                axes.annotate(str(rank), (own / usual, y), xytext=(0, 4), textcoords="offset points", fontsize=6)
    axes.axvline(1, color=plotting.INK, linewidth=0.6, zorder=1)
    if not any(run.own_s for run in shown):
        axes.set_xticks([])
    axes.set_xlabel("own time,\nover the median rank's")


def _draw_memory(axes: Axes, shown: Sequence[RankSpread]) -> None:
    away = [[peak - usual for peak, usual in compare_to_alike(run.peak_bytes, run.parts)] for run in shown]
    farthest = max((abs(peak) for run in away for peak in run), default=0)
    power = find_unit_power(farthest)
    most = farthest / 1024**power
    for y, run in enumerate(away):
        if not run:
            _draw_unknown(axes, y)
            continue
        axes.plot([peak / 1024**power for peak in run], [y] * len(run), **_TICK)
    axes.axvline(0, color=plotting.INK, linewidth=0.6, zorder=1)
    axes.set_xlim(-1.1 * most or -1, 1.1 * most or 1)
    axes.set_xlabel(f"peak allocated, {UNITS[power]},\nless the median rank's")


def _draw_unknown(axes: Axes, y: int) -> None:
    across = axes.get_yaxis_transform()
    axes.text(0.02, y, "unknown", transform=across, va="center", fontsize=5.5, alpha=0.6)
