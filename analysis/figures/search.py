"""Figures of a search: its progress, the importance of fields, each field alone, and time against memory and cost."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from analysis.drawing import Key, Look, Panel, Picture, Space, draw_names, mark, measure_names
from analysis.importance import FieldImportance
from analysis.results import Results
from analysis.searches import MeasuredSearch, SearchTrial

TITLE = "Trials of the search"
ALT = "Objective of each trial against its number, the spent node-hours and each field, and importance of the fields."
NEEDS = "runs in the folder of a search by `zeroscale search`"
PLACE = 20

TRIAL, BEST, FRONT = Look(0), Look(4), Look(2)
_NOTE = (
    "Trials without a value and trials that violate a constraint are not drawn. Importance (fANOVA): fraction of the "
    "variance of the objective's logarithm that the field alone explains, computed from a Gaussian process fitted to "
    "the trials. Bar: 95 % interval of the posterior. Interactions of fields explain the rest of the variance. In the "
    "panels of time against memory or cost, lower left is better, and all trials are drawn, also those that violate a "
    "constraint."
)
_MOST = 3  # most searches that the figure shows
_TRIAL, _SO_FAR, _FRONT = "trial", "best so far", "Pareto front"

Pairs = Sequence[tuple[float, float]]
_Place = Callable[[SearchTrial], float]


def picture(results: Results) -> Picture:
    """Return the figure of the searches, each with panels for its progress, the importance of fields, each field alone,
    and time against memory and cost."""
    panels = [panel for search in results.searches[:_MOST] for panel in _list_panels(search)]
    keys = [Key(_TRIAL, TRIAL.style_marks())]
    return Picture(panels, [*keys, Key(_SO_FAR, BEST.line), Key(_FRONT, FRONT.line)], _NOTE)


def _list_panels(search: MeasuredSearch) -> Iterator[Panel]:
    answered = search.answered
    places: dict[str, _Place] = {"trials": lambda one: one.number, "node-hours": lambda one: one.spent_node_hours}
    for across, place in places.items():
        line = trace_best(search, place)
        pairs = [(place(one), _get_value(one)) for one in answered]
        draw = partial(_draw_trials, trials=answered, pairs=pairs, line=line, label=_SO_FAR)
        yield _build_panel(search, draw, across, search.objective)
    if search.importances:
        names = [one.field for one in search.importances]
        draw = partial(_draw_importances, found=search.importances)
        yield _build_panel(search, draw, "importance", "fraction of the variance", names)
    for field in search.fields:
        shown = [one for one in answered if field in one.values]
        levels = list_levels([one.values[field] for one in shown])
        if len(levels) > 1:
            pairs = [(levels[_format_level(one.values[field])], _get_value(one)) for one in shown]
            draw = partial(_draw_trials, trials=shown, pairs=pairs)
            yield _build_panel(search, draw, field, search.objective, list(levels))
    for up, name, unit in (
        ("peak memory per rank, GiB", "peak_bytes", 2**30), ("node-seconds per sample", "sample_node_s", 1),
    ):  # fmt: skip
        known = [one for one in search.trials if None not in (one.sample_s, getattr(one, name))]
        if len(known) > 1:
            pairs = [(one.sample_s or 0.0, getattr(one, name) / unit) for one in known]
            draw = partial(_draw_trials, trials=known, pairs=pairs, line=find_front(pairs), label=_FRONT, bars=False)
            yield _build_panel(search, draw, "seconds per sample", up)


def trace_best(search: MeasuredSearch, place: Callable[[SearchTrial], float]) -> list[tuple[float, float]]:
    """Return the corner points of a step function that shows the best value of the objective found so far, over the
    trials of a search. `place` returns the x coordinate of a trial."""
    answered = search.answered
    best = list(itertools.accumulate(map(_get_value, answered), min if search.least else max))
    # Two points per trial make a step function: the best value is constant until a better trial ends.
    steps = [
        point
        for trial, before, now in zip(answered, [*best[:1], *best], best, strict=False)
        for point in ((place(trial), before), (place(trial), now))
    ]
    return [*steps, *([(place(search.trials[-1]), best[-1])] if best else [])]


def find_front(pairs: Pairs) -> list[tuple[float, float]]:
    """Return the Pareto front of pairs, sorted by the first number. In both numbers, smaller is better."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(pairs):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def list_levels(column: Sequence[Any]) -> dict[str, int]:
    """Return the position of each distinct value on the x axis, as a mapping from the text of the value to its
    position. Numbers are sorted by size and come first; other values keep their order."""
    numbers = sorted({value for value in column if isinstance(value, int | float) and not isinstance(value, bool)})
    others = dict.fromkeys(_format_level(value) for value in column)
    return {text: place for place, text in enumerate(dict.fromkeys([*map(_format_level, numbers), *others]))}


def _build_panel(
    search: MeasuredSearch, draw: Callable[[Axes], None], across: str, up: str, places: Sequence[str] = ()
) -> Panel:
    def draw_all(axes: Axes) -> None:
        draw(axes)
        axes.set(xlabel=across, ylabel=up)
        if across == "trials":
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if places:
            draw_names(axes, range(len(places)), places)
            axes.set_xlim(-0.5, len(places) - 0.5)

    below = 0.2 + measure_names(places) if places else 0.42
    return Panel(title=[search.study], draw=draw_all, space=Space(below=below), group=search.study)


def _draw_trials(
    axes: Axes, trials: Sequence[SearchTrial], pairs: Pairs, line: Pairs = (), label: str = "", *, bars: bool = True
) -> None:
    (marks,) = axes.plot(*zip(*pairs, strict=True), **TRIAL.style_marks(), alpha=0.75, zorder=3) if pairs else (None,)
    if marks:
        mark(marks, _TRIAL, [f"trial {one.number}: {one.line}" for one in trials])
    ends = [(x, *one.interval) for one, (x, _) in zip(trials, pairs, strict=True) if one.interval and bars]
    if ends:
        mark(axes.vlines(*zip(*ends, strict=True), color=TRIAL.colour, linewidth=0.9), _TRIAL)
    if line:
        look = FRONT if label == _FRONT else BEST
        (joined,) = axes.plot(*zip(*line, strict=True), **look.line, linewidth=1.0, zorder=2)
        mark(joined, label)


def _draw_importances(axes: Axes, found: Sequence[FieldImportance]) -> None:
    (marks,) = axes.plot(range(len(found)), [one.share for one in found], **TRIAL.style_marks())
    mark(marks, "", [f"{one.field}: {100 * one.share:.0f} %" for one in found])
    axes.vlines(range(len(found)), [one.low for one in found], [one.high for one in found], TRIAL.colour, linewidth=0.9)
    axes.set_ylim(bottom=0)


def _get_value(trial: SearchTrial) -> float:
    assert trial.value is not None
    return trial.value


def _format_level(value: Any) -> str:
    """Return the value of a field as a label. A value that sets several fields is labelled by the value of the first,
    and by names and values of the others."""
    if isinstance(value, dict):
        (_, first), *others = value.items()
        return ", ".join([_format_level(first), *(f"{key.rpartition('.')[2]}={other}" for key, other in others)])
    return value if isinstance(value, str) else json.dumps(value)
