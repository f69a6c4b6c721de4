"""Advice on what to measure next where intervals between allocations are wide, and on which nodes runs were made."""

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from analysis.questions import describe_choice
from analysis.results import Results
from analysis.stats.levels import LevelRun, LevelVariances, RepeatAdvice, advise, find_variances
from analysis.stats.series import WIDE
from analysis.summary import Row
from analysis.table import list_rows
from bench.formatting import format_count
from bench.statistics import LEAST, LEVEL, mean_bounds, student


class ConfigurationLevels(NamedTuple):
    """How the time of a configuration scatters by level, and what makes it as sure as it should be."""

    name: str
    levels: LevelVariances
    advice: RepeatAdvice


def list_purchase_caveats(results: Results) -> Iterable[str]:
    """Yield what to buy next for an interval of `WIDE`, and which intervals are of a single set of nodes."""
    found = list(_list_levels(results))
    short = [one for one in found if one.advice.purchase != "enough"]
    if short:
        yield (
            f"Between allocations, {len(short):,} of {len(found):,} configurations with two or more are less sure than "
            f"{100 * WIDE:g} %: {'; '.join(_describe_purchases(short))}."
        )
    alike = sum(one.levels.host_sets == 1 for one in found)
    if alike:
        yield (
            f"{format_count(alike, 'configuration')} had the same nodes in all allocations: intervals between these "
            "hold for those nodes, and not for others."
        )


def _describe_purchases(found: Sequence[ConfigurationLevels]) -> Iterable[str]:
    for purchase, what in (
        ("allocations", "more allocations, not more steps"),
        ("other nodes", "more allocations, on other nodes"),
    ):
        needed = sorted((int(one.advice.amount), one.name) for one in found if one.advice.purchase == purchase)
        if needed:
            (least, first), (most, last) = needed[0], needed[-1]
            ends = f"{first} {least}" if len(needed) == 1 else f"from {least} ({first}) to {most} ({last})"
            yield f"{_count_needing(len(needed))} {what}: {ends}"
    longer = sorted((one.advice.amount, one.name) for one in found if one.advice.purchase == "longer windows")
    if longer:
        times, name = longer[-1]
        text = "longer windows, not more allocations"
        yield f"{_count_needing(len(longer))} {text}: at most {times:g} times as long ({name})"


def _count_needing(count: int) -> str:
    return f"{count:,} {'needs' if count == 1 else 'need'}"


def _list_levels(results: Results) -> Iterable[ConfigurationLevels]:
    rows = [row for row in list_rows(results.summary) if row["n"] > 1 and row["evidence"] == "measured"]
    for row in rows:
        known = find_variances(_list_runs(results, row))
        if known:
            yield ConfigurationLevels(describe_choice(row), known, advise(known, WIDE))


def _list_runs(results: Results, row: Row) -> list[LevelRun]:
    """Return the allocations of a configuration, each with the nodes that its runs were on."""
    hosts: dict[str, list[str]] = {}
    steps: dict[str, list[float]] = {}
    for place in results.list_timed(row):
        if window := results.window(place):
            name, known = results.allocation(place), results.find_environment(place)
            hosts.setdefault(name, []).extend(json.loads(known).get("hosts", ()) if known else ())
            steps.setdefault(name, []).extend(window)
    within = _find_within(list(steps.values()))
    return [
        LevelRun(tuple(sorted({*hosts[name]})), math.log(statistics.fmean(window)), variance)
        for (name, window), variance in zip(steps.items(), within, strict=True)
    ]


def _find_within(windows: Sequence[Sequence[float]]) -> list[float]:
    """Return the variance of the logarithm of each window's mean by its own steps; 0 of too few to tell. Windows of
    one length are worked out together."""
    found = np.zeros(len(windows))
    lengths = np.array([len(window) for window in windows])
    for length in {*lengths[lengths >= LEAST].tolist()}:
        places = np.flatnonzero(lengths == length)
        bounds = mean_bounds(np.array([windows[place] for place in places.tolist()]), LEVEL)
        known = (bounds.low > 0) & np.isfinite(bounds.high)
        reach = np.log(bounds.high[known] / bounds.low[known]) / 2
        found[places[known]] = (reach / student(bounds.freedom[known], LEVEL)) ** 2
    variances: list[float] = found.tolist()
    return variances
