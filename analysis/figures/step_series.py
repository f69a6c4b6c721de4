"""The steps of runs in their order, with the cut between warm-up and window."""

import itertools
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis import plotting
from analysis.charts import groups
from analysis.flags import NO_MEASUREMENT
from analysis.formats import format_significant
from analysis.plotting import panels
from analysis.results import Results
from analysis.summary import Row
from bench.record import RunRecord

TITLE = "Steps in their order"
ALT = (
    "Seconds of every step of a run, a panel per run, with the cut between warm-up and window, the median and its "
    "interval. The tables hold the numbers."
)
PLACE = 9

_NOTE = (
    "For as many questions as there is room, a run of the fastest configuration, and runs whose steps were not steady "
    "as the window opened. A step's time is the slowest rank's. Triangles: warm-up steps beyond the scale, and the "
    "slowest of them."
)
_MOST = 12  # panels
_UNSTEADY = _MOST // 2  # panels that unsteady runs may take from the fastest
STEP: Any = {"color": plotting.COLOURS[0], "marker": ".", "markersize": 3, "linewidth": 0.6}
WARM: Any = {"color": plotting.COLOURS[6], "marker": ".", "markersize": 3, "linewidth": 0.6}
_BEYOND: Any = {"color": plotting.COLOURS[6], "marker": "^", "markersize": 3, "linestyle": "none"}
_BAND: Any = {"color": plotting.COLOURS[1], "alpha": 0.3, "linewidth": 0}
_MEDIAN: Any = {"color": plotting.COLOURS[4], "linewidth": 0.9}


def applies(results: Results) -> bool:
    """Whether any run was timed."""
    return bool(results.table["step_s"].notna().any())


@plotting.styled
def figure(results: Results) -> Figure:
    """Draw seconds per step against the step's number, a panel per run."""
    chosen, omitted = _select_runs(results)
    drawn, axes = panels.build_empty_panels(len(chosen))
    for one, place, labels in zip(axes, chosen, groups.describe_runs(results, chosen), strict=True):
        panels.draw_title(one, " · ".join(labels).split(" · "))
        one.set_xlabel("step")
        one.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        one.yaxis.set_major_locator(MaxNLocator(5))
        _draw_steps(one, results.table.iloc[place], results.record(place))
    if axes:
        axes[0].set_ylabel("s per step")
    plotting.draw_legend(drawn, _build_legend_entries(), _NOTE, omitted)
    return drawn


def _select_runs(results: Results) -> tuple[list[int], str]:
    """Return rows of the run table in its order, at most _MOST, and a sentence about those that are left out."""
    timed = _find_timed_rows(results)
    flagged = timed & results.table["flags"].str.contains("unsteady")
    unsteady = [int(place) for place in flagged.to_numpy(bool).nonzero()[0]]
    fastest = filter(None, (_select_fastest(group.rows) for group in groups.group_by_question(results.summary)))
    wanted = itertools.chain(unsteady[:_UNSTEADY], (results.behind(row)[0] for row in fastest), unsteady)
    shown: dict[int, None] = {}
    while len(shown) < _MOST and (place := next(wanted, None)) is not None:
        shown[place] = None
    return sorted(shown), f"Shown: {len(shown)} of {timed.sum()} timed runs."


def _find_timed_rows(results: Results) -> "pd.Series[bool]":
    """Which rows of the run table were timed, what is no measurement left out."""
    return results.table["step_s"].notna() & ~results.table["flags"].str.contains("|".join(NO_MEASUREMENT))


def _select_fastest(rows: Sequence[Row]) -> Row | None:
    timed = (row for row in rows if row["n"] and row["step_s"] is not None)  # a rehearsal has no step times
    return max(timed, key=lambda row: row["tokens_per_s"] or 0.0, default=None)


def _draw_steps(axes: Axes, row: "pd.Series[Any]", record: RunRecord) -> None:
    assert record.observations is not None and record.observations.steps is not None  # it was timed
    step_s, cut = record.observations.steps.step_s, record.observations.steps.cut
    warm, timed = step_s[:cut], step_s[cut:]
    top = 1.3 * max(timed)
    inside = [(x, second) for x, second in enumerate(warm) if second <= top]
    beyond = [x for x, second in enumerate(warm) if second > top]
    axes.plot([x for x, _ in inside], [second for _, second in inside], **WARM)
    if beyond:
        axes.plot(beyond, [0.97 * top] * len(beyond), **_BEYOND)
        axes.text(cut, 0.97 * top, f" {format_significant(max(warm), 3)} s", fontsize=6, va="center")
    window = range(cut, len(step_s))
    if pd.notna(row["step_s_low"]):
        axes.fill_between([window[0], window[-1]], row["step_s_low"], row["step_s_high"], **_BAND)
    axes.plot(window, timed, zorder=2, **STEP)
    axes.hlines(row["step_s"], window[0], window[-1], zorder=3, **_MEDIAN)
    axes.axvline(cut - 0.5, color=plotting.INK, linewidth=0.8, linestyle=(0, (2, 2)))
    axes.set_ylim(0, top)
    axes.set_xlim(-0.5, len(step_s) - 0.5)


def _build_legend_entries() -> list[Line2D | Patch]:
    return [
        Line2D([], [], label="warm-up", **WARM),
        Line2D([], [], label="cut", color=plotting.INK, linewidth=0.8, linestyle=(0, (2, 2))),
        Line2D([], [], label="window", **STEP),
        Line2D([], [], label="median", **_MEDIAN),
        Patch(label="its 95 % interval within the run", **_BAND),
    ]
