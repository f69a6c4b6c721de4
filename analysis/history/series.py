"""The places of a history in their order, the time per sample of each configuration there, and its changes of level.

A place is a commit, a set of versions or a day.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np

from analysis.flags import NO_MEASUREMENT
from analysis.questions import describe_choice, describe_variants, format_ranks
from analysis.results import Results
from analysis.stats.change_points import LEAST_PLACES, LevelChange, find_changes
from analysis.summary import Row
from analysis.table import list_rows
from bench.core.record import RunRecord

By = Literal["commit", "version", "date"]

_DIGITS = re.compile(r"\d+")
_SHORT = 10  # digits of a commit that are shown


class Origin(NamedTuple):
    """What one run was of."""

    commit: str  # with a + where the code had changes that were not committed; empty where nobody knows
    versions: tuple[tuple[str, str], ...]  # of the environment class, with its container
    started_at: str  # ISO 8601, UTC; empty where nobody knows

    @property
    def date(self) -> str:
        return self.started_at[:10]


class Place(NamedTuple):
    """One place of a history; `key` tells it from others, `name` is short."""

    key: str
    name: str
    started_at: str  # when its first run started


class HistoryAxis(NamedTuple):
    """The places of a history in their order, and what that order is of."""

    by: By
    places: tuple[Place, ...]
    order: str


def find_origin(record: RunRecord) -> Origin:
    """Return what a run was of."""
    environment, started_at = record.environment, record.circumstance.started_at
    if environment is None:
        return Origin("", (), started_at)
    git = environment.git or {}
    commit = str(git.get("commit") or "")
    known = {name: str(value) for name, value in environment.classification.versions.items() if value is not None}
    container = environment.classification.container
    known |= {"container": container} if container else {}
    return Origin(commit + "+" * bool(commit and git.get("dirty")), tuple(known.items()), started_at)


def find_key(origin: Origin, by: By) -> str:
    """Return what tells the place of a run from others; empty where nobody knows."""
    if by == "commit":
        return origin.commit
    return origin.date if by == "date" else ", ".join(f"{name} {value}" for name, value in origin.versions)


def build_axis(origins: Iterable[Origin], by: By, ancestry: Callable[[Sequence[str]], Sequence[str]]) -> HistoryAxis:
    """Return the places of these runs in their order: days by the calendar, versions by their numbers, commits by
    `ancestry`, which returns those of some commits that it knows, ancestors first. Where it knows not all of them they
    stand in the order in which they were first measured."""
    firsts: dict[str, Origin] = {}
    for origin in sorted(origins, key=lambda one: one.started_at):
        if key := find_key(origin, by):
            firsts.setdefault(key, origin)
    if by == "date":
        return _build_axis(by, sorted(firsts), firsts, {}, "by the calendar, UTC")
    if by == "version":
        names = list_varying(firsts.values())
        ordered = sorted(firsts, key=lambda key: _sort_versions(firsts[key], names))
        return _build_axis(
            by, ordered, firsts, {key: _name_versions(firsts[key], names) for key in firsts}, "by number"
        )
    known = list(ancestry([key.rstrip("+") for key in firsts]))
    if {key.rstrip("+") for key in firsts} <= set(known):
        ordered = sorted(firsts, key=lambda key: (known.index(key.rstrip("+")), key))
        return _build_axis(by, ordered, firsts, _shorten(firsts), "ancestors first, as git has it")
    return _build_axis(by, list(firsts), firsts, _shorten(firsts), "in the order in which they were first measured")


def list_varying(origins: Iterable[Origin]) -> list[str]:
    """Return what has several versions among these runs."""
    known = [dict(one.versions) for one in origins]
    names = dict.fromkeys(name for one in known for name in one)
    return [name for name in names if len({one.get(name) for one in known}) > 1]


def describe_other_differences(before: Origin, after: Origin, by: By) -> str:
    """Say in what two runs differ besides what the history is by; empty where nobody knows anything."""
    differ = []
    if by != "version":
        old, new = dict(before.versions), dict(after.versions)
        names = list_varying([before, after])
        differ += [f"{name} {old.get(name, 'none')} → {new.get(name, 'none')}" for name in names]
    if by != "commit" and before.commit != after.commit and before.commit and after.commit:
        differ.append(f"commit {shorten_commit(before.commit)} → {shorten_commit(after.commit)}")
    return ", ".join(differ)


def shorten_commit(key: str) -> str:
    """Return a commit as people are shown it."""
    return key.rstrip("+")[:_SHORT] + " with changes" * key.endswith("+")


def _shorten(keys: Iterable[str]) -> dict[str, str]:
    return {key: shorten_commit(key) for key in keys}


def _build_axis(
    by: By, ordered: Sequence[str], firsts: Mapping[str, Origin], names: Mapping[str, str], order: str
) -> HistoryAxis:
    return HistoryAxis(by, tuple(Place(key, names.get(key, key), firsts[key].started_at) for key in ordered), order)


def _sort_versions(origin: Origin, names: Sequence[str]) -> tuple[tuple[tuple[int, ...], str], ...]:
    known = dict(origin.versions)
    texts = [known.get(name, "") for name in names]
    return tuple((tuple(map(int, _DIGITS.findall(text))), text) for text in texts)


def _name_versions(origin: Origin, names: Sequence[str]) -> str:
    known = dict(origin.versions)
    return ", ".join(f"{name} {known.get(name, 'none')}" for name in names) or "all alike"


class PlaceValue(NamedTuple):
    """What a configuration took at a place: seconds per sample by allocation, each the mean over its windows."""

    place: int
    sample_s: tuple[float, ...]
    origin: Origin  # of its first run

    @property
    def typical(self) -> float:
        """The geometric mean over the allocations."""
        return math.exp(sum(map(math.log, self.sample_s)) / len(self.sample_s))


class HistoryChange(NamedTuple):
    """A change of a configuration's level, its places those of the axis."""

    change: LevelChange
    also: str  # what else is known to differ between the two sides


class HistorySeries(NamedTuple):
    """One configuration on one kind of device over the places of a history."""

    name: str
    config_id: str
    machine: str
    values: tuple[PlaceValue, ...]  # in the order of their places
    changes: tuple[HistoryChange, ...]
    flagged: int  # runs that are left out, for other processes disturbed them
    failed: int  # runs that are left out, for they have no time

    @property
    def short(self) -> bool:
        """Whether it has too few places for a change to be told."""
        return len(self.values) < LEAST_PLACES

    def level(self, place: int) -> float:
        """Return the level at a place of the axis: the geometric mean over the places between two changes."""
        starts = [one.change.after for one in self.changes]
        part = sum(start <= place for start in starts)
        same = [one.typical for one in self.values if sum(start <= one.place for start in starts) == part]
        return math.exp(sum(map(math.log, same)) / len(same))


class History(NamedTuple):
    """The answer."""

    axis: HistoryAxis
    series: tuple[HistorySeries, ...]  # those with changes first
    nowhere: int  # runs of which nobody knows the place
    days: tuple[str, ...]  # the first and the last


class _Run(NamedTuple):
    """A run of the table that a history is made of."""

    place: int  # in the table
    row: Row
    record: RunRecord
    origin: Origin


def build_history(
    results: Results, by: By, ancestry: Callable[[Sequence[str]], Sequence[str]] = lambda commits: ()
) -> History:
    """Return the history of what was measured, over all configurations together (`analysis.stats.change_points`)."""
    runs = list(_list_runs(results))
    placed = [run for run in runs if find_key(run.origin, by)]
    axis = build_axis([run.origin for run in placed], by, ancestry)
    drafts = [_draft(results, members, axis) for members in _group_by_series(placed, _name_series(results)).values()]
    drafts = [one for one in drafts if one.values]
    found = find_changes([_logs(one, len(axis.places)) for one in drafts])
    series = [_add_changes(one, changes, by) for one, changes in zip(drafts, found, strict=True)]
    days = sorted({run.origin.date for run in placed} - {""})
    return History(
        axis,
        tuple(sorted(series, key=lambda one: (not one.changes, one.short))),
        len(runs) - len(placed),
        tuple(dict.fromkeys(days[:1] + days[-1:])),
    )


def _list_runs(results: Results) -> Sequence[_Run]:
    """Return the last attempt at every repeat of every folder, measured: two rounds of `ab` are two folders, whose
    repeats have equal numbers."""
    last: dict[tuple[str, int], tuple[int, Row]] = {}
    files = results.traces["file"]
    for place, row in enumerate(list_rows(results.table)):
        if row["evidence"] == "measured":
            folder = str(files.iloc[place]).rsplit("/", 2)[0]
            before = last.get((folder, row["repeat"]))
            if before is None or row["attempt"] >= before[1]["attempt"]:
                last[folder, row["repeat"]] = place, row
    found = []
    for place, row in last.values():
        record = results.record(place)
        found.append(_Run(place, row, record, find_origin(record)))
    return found


def _name_series(results: Results) -> Callable[[_Run], tuple[str, ...]]:
    """Return what names the series of a run: what was measured, and on what."""
    variants = describe_variants(results.specs)
    several = len(set(results.table["machine"])) > 1

    def name(run: _Run) -> tuple[str, ...]:
        row = run.row | {"variant": variants.get(run.row["config_id"], "")}
        known = run.record.environment.classification if run.record.environment else None
        place = () if known is None else (known.device, f"{known.cores} cores", f"{known.threads} threads")
        text = " · ".join([
            row["model"], format_ranks(row), describe_choice(row), row["precision"], *([row["machine"]] * several)
        ])  # fmt: skip
        return text, row["config_id"], row["machine"], *place

    return name


def _group_by_series(
    runs: Sequence[_Run], name: Callable[[_Run], tuple[str, ...]]
) -> Mapping[tuple[str, ...], Sequence[tuple[str, _Run]]]:
    groups: dict[tuple[str, ...], list[_Run]] = {}
    for run in runs:
        groups.setdefault(name(run), []).append(run)
    texts = [key[0] for key in groups]
    return {
        key: [(key[0] if texts.count(key[0]) == 1 else " · ".join([key[0], *key[3:]]), run) for run in members]
        for key, members in groups.items()
    }


def _draft(results: Results, members: Sequence[tuple[str, _Run]], axis: HistoryAxis) -> HistorySeries:
    """Return a series whose changes nobody has looked for."""
    index = {place.key: number for number, place in enumerate(axis.places)}
    times: dict[int, dict[str, list[float]]] = {}
    firsts: dict[int, Origin] = {}
    flagged = failed = 0
    for _, run in sorted(members, key=lambda one: one[1].origin.started_at):
        steps = results.window(run.place) if run.row["outcome"] == "ok" else []
        if not steps or not set(NO_MEASUREMENT).isdisjoint(run.row["flags"].split()):
            failed += 1
        elif results.is_disturbed(run.place):
            flagged += 1
        else:
            place = index[find_key(run.origin, axis.by)]
            allocation = times.setdefault(place, {}).setdefault(results.allocation(run.place), [])
            allocation += [seconds / run.row["global_batch"] for seconds in steps]
            firsts.setdefault(place, run.origin)
    values = [
        PlaceValue(place, tuple(float(np.mean(steps)) for steps in times[place].values()), firsts[place])
        for place in sorted(times)
    ]
    name, first = members[0]
    return HistorySeries(name, first.row["config_id"], first.row["machine"], tuple(values), (), flagged, failed)


def _logs(series: HistorySeries, places: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    logs = np.full(places, np.nan)
    for one in series.values:
        logs[one.place] = math.log(one.typical)
    return logs


def _add_changes(series: HistorySeries, found: Sequence[LevelChange], by: By) -> HistorySeries:
    origins = {one.place: one.origin for one in series.values}
    changes = [
        HistoryChange(one, describe_other_differences(origins[one.before], origins[one.after], by)) for one in found
    ]
    return series._replace(changes=tuple(changes))
