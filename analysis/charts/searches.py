"""What a search has found, as charts: its history, what mattered, each field by itself, all together, trade-offs."""

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

from analysis.charts.scatter import ScatterChart, ScatterPanel, ScatterPoint, ScatterSeries, join_points
from analysis.searches import MeasuredSearch, SearchTrial

_MOST = 3  # searches of one figure
_TRIAL, _BEST, _FAILED = 0, 4, 6  # looks
_GOOD = 0.1  # of the trials, the best

_Searches = Sequence[MeasuredSearch]


def build_history(searches: _Searches) -> ScatterChart:
    """Return the trials and the best so far, against their number and the node-hours."""
    panels = []
    for search in searches[:_MOST]:
        panels.append(_build_history_panel(search, "trials", lambda trial: trial.number))
        panels.append(_build_history_panel(search, "node-hours", lambda trial: trial.spent_node_hours))
    return ScatterChart(tuple(panels), "Trials without an answer, or beyond a constraint, are not drawn.")


def _build_history_panel(search: MeasuredSearch, across: str, place: Callable[[SearchTrial], float]) -> ScatterPanel:
    answered = search.answered
    better = min if search.least else max
    best = list(itertools.accumulate((_get_value(trial) for trial in answered), better))
    steps = [
        point
        for trial, before, now in zip(answered, [*best[:1], *best], best, strict=False)
        for point in ((place(trial), before), (place(trial), now))
    ]
    last = place(search.trials[-1])
    line = join_points([*steps, *([(last, best[-1])] if best else [])])
    series = (
        ScatterSeries("a trial", _TRIAL, tuple(_build_point(trial, place(trial)) for trial in answered)),
        ScatterSeries("best so far", _BEST, line, joined=True),
    )
    return ScatterPanel(search.study, across, search.objective, series)


def build_importance(searches: _Searches) -> ScatterChart:
    """Return the part of the variance that each field explains."""
    panels = []
    for search in [one for one in searches if one.importances][:_MOST]:
        points = tuple(
            ScatterPoint(place, one.share, f"{one.field}: {100 * one.share:.0f} %", (one.low, one.high))
            for place, one in enumerate(search.importances)
        )
        names = tuple(one.field for one in search.importances)
        up = f"part of the variance of log {search.objective}"
        panels.append(ScatterPanel(search.study, "", up, (ScatterSeries("", _TRIAL, points),), names, from_zero=True))
    note = (
        "By each field alone, over the whole space, of a Gaussian process through the trials (fANOVA); what fields do "
        "together is what is missing to 1. Bars: 95 % of the functions that the trials allow."
    )
    return ScatterChart(tuple(panels), note)


def build_slices(searches: _Searches) -> ScatterChart:
    """Return the trials against each field alone."""
    panels = []
    for search in searches[:_MOST]:
        for field in search.fields:
            shown = [trial for trial in search.answered if field in trial.values]
            levels = _list_levels([trial.values[field] for trial in shown])
            if len(levels) > 1:
                points = tuple(_build_point(one, levels[_format_level(one.values[field])]) for one in shown)
                series = (ScatterSeries("a trial", _TRIAL, points),)
                panels.append(ScatterPanel(search.study, field, search.objective, series, tuple(levels)))
    return ScatterChart(tuple(panels), "Every trial against one field; the others differ too.")


def build_parallel(searches: _Searches) -> ScatterChart:
    """Return a line per trial through its values, the best ones marked."""
    panels = []
    for search in searches[:_MOST]:
        answered = search.answered
        levels = {
            field: _list_levels([one.values[field] for one in answered if field in one.values])
            for field in search.fields
        }
        fields = [field for field in search.fields if len(levels[field]) > 1]
        by_value = sorted(answered, key=_get_value, reverse=not search.least)
        good = {one.number for one in by_value[: max(1, round(_GOOD * len(by_value)))]}
        series = []
        for one in sorted(answered, key=lambda trial: trial.number in good):
            places = [
                (place, levels[field][_format_level(one.values[field])] / (len(levels[field]) - 1))
                for place, field in enumerate(fields)
                if field in one.values
            ]
            label, look = ("the best tenth", _BEST) if one.number in good else ("a trial", _FAILED)
            series.append(ScatterSeries(label, look, join_points(places), joined=True))
        names = tuple(f"{field}: {' '.join(_shorten_ends(list(levels[field])))}" for field in fields)
        if len(fields) > 1:
            panels.append(ScatterPanel(search.study, "", "place among its values", tuple(series), names))
    return ScatterChart(
        tuple(panels), "A line per trial; along each axis the values in order, with the first and last."
    )


def _get_peak_gib(trial: SearchTrial) -> float | None:
    return None if trial.peak_bytes is None else trial.peak_bytes / 2**30


def _get_node_seconds(trial: SearchTrial) -> float | None:
    return trial.sample_node_s


_FRONTS = (("peak memory of a rank, GiB", _get_peak_gib), ("node-seconds per sample", _get_node_seconds))


def build_front(searches: _Searches) -> ScatterChart:
    """Return time against memory and against cost, with what nothing else beats in both."""
    panels = []
    for search in searches[:_MOST]:
        for up, get in _FRONTS:
            pairs = [
                (trial.sample_s, y, trial)
                for trial in search.trials
                if trial.sample_s is not None and (y := get(trial)) is not None
            ]
            if len(pairs) > 1:
                points = tuple(ScatterPoint(x, y, _describe(trial)) for x, y, trial in pairs)
                front = join_points(find_front([(x, y) for x, y, _ in pairs]))
                series = (
                    ScatterSeries("a trial", _TRIAL, points),
                    ScatterSeries("not beaten in both", _BEST, front, joined=True),
                )
                panels.append(ScatterPanel(search.study, "seconds per sample", up, series))
    return ScatterChart(tuple(panels), "The nearer to the lower left, the better. Constraints are not looked at.")


def find_front(pairs: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the pairs than which no other is smaller in one and as small in the other, by the first."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(pairs):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def _get_value(trial: SearchTrial) -> float:
    assert trial.value is not None
    return trial.value


def _build_point(trial: SearchTrial, x: float) -> ScatterPoint:
    return ScatterPoint(x, _get_value(trial), _describe(trial), trial.interval)


def _describe(trial: SearchTrial) -> str:
    return f"trial {trial.number}: {trial.line}"


def _list_levels(column: Sequence[Any]) -> dict[str, int]:
    """Return the place of each value: numbers by size, and others as they come."""
    numbers = sorted({value for value in column if isinstance(value, int | float) and not isinstance(value, bool)})
    others = dict.fromkeys(_format_level(value) for value in column)
    return {text: place for place, text in enumerate(dict.fromkeys([*map(_format_level, numbers), *others]))}


def _format_level(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _shorten_ends(levels: list[str]) -> list[str]:
    return [levels[0][:12], "to", levels[-1][:12]]
