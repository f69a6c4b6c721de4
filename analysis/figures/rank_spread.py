"""Figure of differences between the ranks of a run: time in a step outside of collectives, and memory."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes

from analysis.drawing import (
    COLOURS,
    INK,
    Key,
    Panel,
    Picture,
    Space,
    count_letters,
    get_room_in,
    groups,
    mark,
    shorten_names,
)
from analysis.flags import NO_MEASUREMENT
from analysis.formats import UNITS, find_unit_power
from analysis.observed import list_by_rank, list_own_seconds
from analysis.results import Results
from analysis.summary import KEY
from bench.core.quantities import compare_to_alike, find_slow_ranks

TITLE = "Differences between ranks"
ALT = "A line per run and a tick per rank: time outside collectives and peak memory, compared with the median rank."
NEEDS = "runs of several ranks with times or memory of each rank"
PLACE = 8

_NOTE = (
    "Ticks: ranks. The time outside collectives is that of one untimed step, so it has no interval. Diamonds: slow "
    "ranks, which are more than 20 % and 20 ms slower than the median of the other ranks. A rank is compared only with "
    "ranks that hold the same layers."
)
_EVEN = "Memory has no panel, because all ranks of each run have the same peak."
_MOST, _LINE_IN, _SIZE = 20, 0.32, 6  # lines, their height, and the font size of their names
_TICK: Any = {"color": COLOURS[0], "marker": "|", "markersize": 7, "markeredgewidth": 1.1, "linestyle": "none"}
_SLOW: Any = {"color": COLOURS[4], "marker": "D", "markersize": 4, "linestyle": "none"}
_MEMORY = "peak allocated memory"
_RANK, _SLOW_RANK = "rank", "slow rank, with its number"


class RankSpread(NamedTuple):
    """Seconds per step outside of collectives (`own_s`), and peak bytes, of each rank of one run. Each of the two lists
    is empty if the value of any rank is unknown."""

    own_s: Sequence[float]
    peak_bytes: Sequence[int]
    parts: int  # number of parts of the layers; only ranks that hold the same part are compared


def picture(results: Results) -> Picture:
    """Return a panel of times and a panel of memory. Each configuration on each machine is represented by the
    run whose ranks differ most."""
    most, number = _select_most_spread(results.table)
    shown = []
    for record in map(results.record, most):
        peaks, parts = list_by_rank(record, "peak_allocated_bytes"), record.spec.parallel.pipeline
        shown.append(RankSpread(list_own_seconds(record), peaks if len(peaks) == record.spec.world_size else (), parts))
    labels = [" · ".join(parts) for parts in groups.describe_runs(results, most)] if most else []
    space = Space(_LINE_IN * len(shown) + 0.1, 0.15, 0.15)
    panels = []
    if any(run.own_s for run in shown):
        draw = partial(_draw_own_times, shown=shown, labels=labels)
        panels.append(Panel(title=["time outside collectives"], draw=draw, space=space))
    if any(len(set(run.peak_bytes)) > 1 for run in shown):
        panels.append(Panel(title=[_MEMORY], draw=partial(_draw_memory, shown=shown, labels=labels), space=space))
    even = _EVEN if any(run.peak_bytes for run in shown) and all(panel.title != [_MEMORY] for panel in panels) else ""
    omitted = groups.describe_omitted(number, "configurations", "smallest spread", _MOST)
    return Picture(panels, [Key(_RANK, _TICK), Key(_SLOW_RANK, _SLOW)], " ".join(filter(None, [_NOTE, even, omitted])))


def _select_most_spread(table: pd.DataFrame) -> tuple[list[int], int]:
    """Return the row indices of the runs to draw, and the number of configurations from which they were selected.

    For each configuration on each machine, the run whose ranks differ most is selected. The run with the largest
    difference comes first, and at most _MOST runs are returned.
    """
    known = table["slowest_over_median"].notna() | table["peak_allocated_spread_bytes"].notna()
    shown = (table["outcome"] == "ok") & ~table["flags"].str.contains("|".join(NO_MEASUREMENT)) & known
    # By time first: a slow rank delays all others, while uneven memory costs nothing until one rank runs out.
    worst = table.reset_index(drop=True)[shown.to_numpy(bool)].sort_values(
        ["slowest_over_median", "peak_allocated_spread_bytes"], ascending=False, kind="stable"
    )
    places = worst.drop_duplicates(list(KEY)).index
    return [int(place) for place in places[:_MOST]], len(places)


def _draw_own_times(axes: Axes, shown: Sequence[RankSpread], labels: Sequence[str]) -> None:
    for y, run in enumerate(shown):
        slow = find_slow_ranks(run.own_s, run.parts) if run.own_s else ()
        pairs = compare_to_alike(run.own_s, run.parts) if run.own_s else ()
        ranks = [(own / usual, rank) for rank, (own, usual) in enumerate(pairs)]
        for label, style in ((_RANK, _TICK), (_SLOW_RANK, _SLOW)):
            if some := [one for one in ranks if (one[1] in slow) == (label == _SLOW_RANK)]:
                (marks,) = axes.plot([x for x, _ in some], [y] * len(some), **style)
                mark(marks, label, [f"rank {rank}: {x:.3g} times the median" for x, rank in some])
        for x, rank in ranks:
            if rank in slow:
                at: Any = {"textcoords": "offset points", "va": "center", "fontsize": 6}
                mark(axes.annotate(str(rank), (x, y), (4, 0), **at), _SLOW_RANK)
    axes.set_xlabel("ratio to the median rank")
    _name_lines(axes, 1, labels, [bool(run.own_s) for run in shown])


def _draw_memory(axes: Axes, shown: Sequence[RankSpread], labels: Sequence[str]) -> None:
    away = [[peak - usual for peak, usual in compare_to_alike(run.peak_bytes, run.parts)] for run in shown]
    farthest = max((abs(peak) for run in away for peak in run), default=0)
    power = find_unit_power(farthest)
    for y, run in enumerate(away):
        if run:
            (marks,) = axes.plot([peak / 1024**power for peak in run], [y] * len(run), **_TICK)
            tips = [f"rank {rank}: {peak / 1024**power:+.3g} {UNITS[power]}" for rank, peak in enumerate(run)]
            mark(marks, _RANK, tips)
    most = farthest / 1024**power
    axes.set_xlim(-1.1 * most, 1.1 * most)  # never empty: without a difference there is no panel
    axes.set_xlabel(f"difference from the median rank, {UNITS[power]}")
    _name_lines(axes, 0, labels, list(map(bool, away)))


def _name_lines(axes: Axes, median: float, labels: Sequence[str], known: Sequence[bool]) -> None:
    """Draw the name of each run above its line, and a mark at the median rank."""
    lines = range(len(labels))
    axes.vlines([median] * len(labels), [y - 0.22 for y in lines], [y + 0.22 for y in lines], INK, linewidth=0.6)
    axes.set_yticks([])
    axes.set_ylim(len(labels) - 0.5, -0.75)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=True, axis="x")
    room = get_room_in(axes)
    rooms = [count_letters(one, room, _SIZE) - 10 * (not is_known) for one, is_known in zip(labels, known, strict=True)]
    for y, (label, is_known) in enumerate(zip(shorten_names(labels, rooms), known, strict=True)):
        text = label + ("" if is_known else ": unknown")
        axes.text(0, y - 0.42, text, transform=axes.get_yaxis_transform(), va="center", fontsize=_SIZE)
