"""Figure of the step times of single runs in their order, with a line between warm-up and timed window."""

import itertools
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from analysis.drawing import COLOURS, INK, Key, Panel, Picture, groups, mark
from analysis.flags import NO_MEASUREMENT
from analysis.formats import format_significant
from analysis.results import Results
from bench.core.record import RunRecord

TITLE = "Step times of single runs"
ALT = "Time of every step of a run in order, with the end of the warm-up, the median and its interval."
NEEDS = "runs with times of steps"
PLACE = 9

_BREAK = re.compile(r" \(|\)?, ")
_MOST = 12  # panels
_NOTE = (
    "The figure shows a run of the fastest configuration of each question, and runs with the flag unsteady, in at most "
    f"{_MOST} panels. The time of a step is that of the slowest rank. Triangles: warm-up steps above the axis, with "
    "the time of the longest one."
)
_DOTTED = 200  # steps up to which each has a dot; more would look like a band, and make a large file
_UNSTEADY = _MOST // 2  # panels that unsteady runs may take before the fastest ones
STEP: Any = {"color": COLOURS[0], "marker": ".", "markersize": 3, "linewidth": 0.6}
WARM: Any = {"color": COLOURS[6], "marker": ".", "markersize": 3, "linewidth": 0.6}
_BEYOND: Any = {"color": COLOURS[6], "marker": "^", "markersize": 3, "linestyle": "none"}
_BAND: Any = {"color": COLOURS[1], "alpha": 0.3, "linewidth": 0}
_MEDIAN: Any = {"color": COLOURS[4], "linewidth": 0.9}
_CUT: Any = {"color": INK, "linewidth": 0.8, "linestyle": (0, (2, 2))}
_WARM_UP, _WINDOW, _WINDOW_MEDIAN = "warm-up step", "timed step (window)", "median of the window"
_KEYS = (
    Key(_WARM_UP, WARM), Key("end of the warm-up", _CUT), Key(_WINDOW, STEP), Key(_WINDOW_MEDIAN, _MEDIAN),
    Key("95 % interval of the median, within the run", _BAND, patch=True),
)  # fmt: skip


def picture(results: Results) -> Picture:
    """Return the figure of seconds per step against the number of the step, with one panel per run."""
    if not results.table["step_s"].notna().any():
        return Picture()
    chosen, omitted = _select_runs(results)
    panels = []
    for place, title in zip(chosen, _list_titles(results, chosen), strict=True):
        draw = partial(_draw_steps, row=results.table.iloc[place], record=results.record(place))
        panels.append(Panel(title=title, draw=draw))
    return Picture(panels, _KEYS, f"{_NOTE} {omitted}")


def _list_titles(results: Results, chosen: Sequence[int]) -> list[list[str]]:
    """Return the title of each run as a list of words. If several titles would be equal, seed and repeat are added to
    these titles. A seed or repeat that all runs share is not added. Each setting is one word, so that a line can break
    before it."""
    described = groups.describe_runs(results, chosen)
    titles = [
        [word for part in " · ".join(labels).split(" · ") for word in (_BREAK.split(part) if " (" in part else [part])]
        for labels in described
    ]
    alike = {labels for labels in described if described.count(labels) > 1}
    table = results.table.iloc[list(chosen)]
    for column in ("seed", "repeat"):
        if table[column].nunique() > 1:
            for labels, title, value in zip(described, titles, table[column], strict=True):
                title += [f"{column} {value}"] * (labels in alike)
    return titles


def _select_runs(results: Results) -> tuple[list[int], str]:
    """Return the row indices of at most _MOST runs to draw, in ascending order, and a sentence on their number.

    At most _UNSTEADY runs with the flag `unsteady` are selected first, then a run of the fastest configuration of each
    question (configurations that do the same work on equal hardware), then further unsteady runs.
    """
    # Runs with an injected fault (drills) and runs on hosts of another job are no measurements.
    timed = results.table["step_s"].notna() & ~results.table["flags"].str.contains("|".join(NO_MEASUREMENT))
    flagged = timed & results.table["flags"].str.contains("unsteady")
    unsteady = [int(place) for place in flagged.to_numpy(bool).nonzero()[0]]
    fastest = []
    for group in groups.group_by_question(results.summary):
        rows = [row for row in group.rows if row["n"] and row["step_s"] is not None]  # a rehearsal has no step times
        fastest += [max(rows, key=lambda row: row["tokens_per_s"] or 0.0)] if rows else []
    wanted = itertools.chain(unsteady[:_UNSTEADY], (results.behind(row)[0] for row in fastest), unsteady)
    # A run may be both unsteady and the fastest; the dict holds it once and keeps the order.
    shown = list(dict.fromkeys(wanted))[:_MOST]
    return sorted(shown), f"Shown: {len(shown)} of {timed.sum()} timed runs."


def _draw_steps(axes: Axes, row: "pd.Series[Any]", record: RunRecord) -> None:
    assert record.observations is not None and record.observations.steps is not None  # it was timed
    step_s, cut = record.observations.steps.step_s, record.observations.steps.cut
    warm, timed = step_s[:cut], step_s[cut:]
    # Warm-up steps can take minutes, so the y axis fits the timed window. Triangles mark warm-up steps beyond it.
    top = 1.3 * max(timed)
    inside = [(x, second) for x, second in enumerate(warm) if second <= top]
    beyond = [x for x, second in enumerate(warm) if second > top]
    mark(axes.plot([x for x, _ in inside], [second for _, second in inside], **WARM)[0], _WARM_UP)
    if beyond:
        mark(axes.plot(beyond, [0.97 * top] * len(beyond), **_BEYOND)[0], _WARM_UP)
        axes.text(cut, 0.97 * top, f" {format_significant(max(warm), 3)} s", fontsize=6, va="center")
    window = range(cut, len(step_s))
    if pd.notna(row["step_s_low"]):
        band = axes.fill_between([window[0], window[-1]], row["step_s_low"], row["step_s_high"], **_BAND)
        mark(band, _KEYS[-1].label)
    dots = {"marker": "none"} if len(step_s) > _DOTTED else {}
    mark(axes.plot(window, timed, zorder=2, **(STEP | dots))[0], _WINDOW)
    mark(axes.hlines(row["step_s"], window[0], window[-1], zorder=3, **_MEDIAN), _WINDOW_MEDIAN)
    axes.axvline(cut - 0.5, **_CUT)
    axes.set_ylim(0, top)
    axes.set_xlim(-0.5, len(step_s) - 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.set(xlabel="step", ylabel="step time, s")
