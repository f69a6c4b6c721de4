"""History: the time per sample of each configuration over commits, versions or dates, and the changes of its level.

A position on the time axis is called a place. It is a commit, a set of software versions or a day. The module `output`
renders a history as text, CSV tables and an HTML page.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
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
Ancestry = Callable[[Sequence[str]], Sequence[str]]
"""Function that takes commits and returns those that git knows, ancestors first."""

_DIGITS = re.compile(r"\d+")
_SHORT = 10  # digits of a commit hash that are displayed


class Origin(NamedTuple):
    """Commit, software versions and start time of a run."""

    commit: str  # commit hash, followed by + if the code had uncommitted changes; empty if unknown
    versions: tuple[tuple[str, str], ...]  # (name, version) of each package, and of the container
    started_at: str  # ISO 8601, UTC; empty if unknown

    @property
    def date(self) -> str:
        return self.started_at[:10]


class Place(NamedTuple):
    """One place of a history: a commit, a set of software versions or a day. `key` is unique; `name` is short, for
    display."""

    key: str
    name: str
    started_at: str  # start time of the first run at this place; ISO 8601, UTC


class HistoryAxis(NamedTuple):
    """The places of a history (commits, sets of versions or days) in order, and a description of this order."""

    by: By
    places: tuple[Place, ...]
    order: str


class PlaceValue(NamedTuple):
    """Measured times of a configuration at one place. A place is a commit, a set of software versions or a day. Each
    time is the mean over the timed steps of an allocation, which is one start of a Slurm job."""

    place: int  # index of the axis
    sample_s: tuple[float, ...]  # seconds per sample, one value per allocation
    origin: Origin  # of the first run at this place

    @property
    def typical(self) -> float:
        """Geometric mean of the times of all allocations (`sample_s`), in seconds per sample."""
        return _compute_geometric_mean(self.sample_s)


class HistoryChange(NamedTuple):
    """A change of a configuration's time per sample. In `change`, each commit, set of versions or day is given by its
    index on the time axis."""

    change: LevelChange
    also: str  # other known differences between the runs before and after the change


class HistorySeries(NamedTuple):
    """Times of one configuration on one kind of device over the places of a history (its commits, versions or days),
    and the detected changes."""

    name: str
    config_id: str
    machine: str
    values: tuple[PlaceValue, ...]  # in the order of the places
    changes: tuple[HistoryChange, ...]
    flagged: int  # number of runs excluded because of background load
    failed: int  # number of runs excluded because they have no step times

    @property
    def short(self) -> bool:
        """Return True if the series has values at too few places (commits, versions or days) to detect a change."""
        return len(self.values) < LEAST_PLACES

    def level(self, place: int) -> float:
        """Return the level of the series at a place (commit, version or day), in seconds per sample. Detected changes
        divide the series into sections. The level is the geometric mean of the times at all places of the section that
        contains `place`."""
        starts = [one.change.after for one in self.changes]
        part = sum(start <= place for start in starts)
        return _compute_geometric_mean(
            [one.typical for one in self.values if sum(start <= one.place for start in starts) == part]
        )


class History(NamedTuple):
    """The history of all configurations in a set of runs."""

    axis: HistoryAxis
    series: tuple[HistorySeries, ...]  # series with changes first
    flagged: int  # number of runs excluded because of background load, also of configurations without any value
    failed: int  # number of runs excluded because they have no step times, also of configurations without any value
    nowhere: int  # number of runs whose commit, versions or date are unknown
    days: tuple[str, ...]  # first and last day of the measurements


class _Run(NamedTuple):
    """A row of the run table with its record and origin."""

    place: int  # row number in the run table
    row: Row
    record: RunRecord
    origin: Origin


def build_history(results: Results, by: By, ancestry: Ancestry = lambda commits: ()) -> History:
    """Return the history of all measured configurations, with the detected changes. If no configuration became faster
    or slower, the probability of reporting at least one change is at most 5 %.

    `by` is the kind of the time axis: commits, software versions or days. `ancestry` sorts commits: it takes commit
    hashes and returns those that git knows, ancestors first.
    """
    runs = list(_list_runs(results))
    placed = [run for run in runs if find_key(run.origin, by)]
    axis = build_axis([run.origin for run in placed], by, ancestry)
    drafts = [_draft(results, name, members, axis) for name, members in _group_by_series(results, placed)]
    flagged, failed = sum(one.flagged for one in drafts), sum(one.failed for one in drafts)
    drafts = [one for one in drafts if one.values]
    found = find_changes([_compute_logs(one, len(axis.places)) for one in drafts])
    series = []
    for one, changes in zip(drafts, found, strict=True):
        origins = {value.place: value.origin for value in one.values}
        also = [describe_other_differences(origins[each.before], origins[each.after], by) for each in changes]
        series.append(one._replace(changes=tuple(map(HistoryChange, changes, also))))
    series.sort(key=lambda one: (not one.changes, one.short))
    days = sorted({run.origin.date for run in placed} - {""})
    ends, nowhere = tuple(dict.fromkeys(days[:1] + days[-1:])), len(runs) - len(placed)
    return History(axis, tuple(series), flagged, failed, nowhere, ends)


# ---------------------------------------- places


def find_origin(record: RunRecord) -> Origin:
    """Return the commit, software versions and start time of a run."""
    environment, started_at = record.environment, record.circumstance.started_at
    if environment is None:
        return Origin("", (), started_at)
    git = environment.git or {}
    commit = str(git.get("commit") or "")
    known = {name: str(value) for name, value in environment.classification.versions.items() if value is not None}
    if container := environment.classification.container:
        known["container"] = container
    return Origin(commit + "+" * bool(commit and git.get("dirty")), tuple(known.items()), started_at)


def find_key(origin: Origin, by: By) -> str:
    """Return the key of the place (commit, set of versions or day) to which a run belongs. The key is empty if this
    property of the run is unknown."""
    if by == "commit":
        return origin.commit
    return origin.date if by == "date" else ", ".join(f"{name} {value}" for name, value in origin.versions)


def build_axis(origins: Iterable[Origin], by: By, ancestry: Ancestry) -> HistoryAxis:
    """Return the places of all runs in order: days by date, versions by version number, commits by ancestry.

    If `ancestry` does not know all commits, the commits are sorted by the time of their first measurement.
    """
    firsts: dict[str, Origin] = {}
    for origin in sorted(origins, key=lambda one: one.started_at):
        if key := find_key(origin, by):
            firsts.setdefault(key, origin)
    keys, names, order = list(firsts), {key: key for key in firsts}, "in calendar order (UTC)"
    if by == "date":
        keys.sort()
    elif by == "version":
        varying, order = list_varying(firsts.values()), "sorted by version number"
        versions = {key: dict(origin.versions) for key, origin in firsts.items()}
        for key, known in versions.items():
            names[key] = ", ".join(f"{name} {known.get(name, 'none')}" for name in varying) or "equal versions"
        keys.sort(key=lambda key: [_split_version(versions[key].get(name, "")) for name in varying])
    else:
        commits = {key: key.rstrip("+") for key in firsts}
        names, known_commits = {key: shorten_commit(key) for key in firsts}, list(ancestry(list(commits.values())))
        order = "in the order of their first measurement"
        if set(commits.values()) <= set(known_commits):
            keys.sort(key=lambda key: (known_commits.index(commits[key]), key))
            order = "sorted by git ancestry, ancestors first"
    return HistoryAxis(by, tuple(Place(key, names[key], firsts[key].started_at) for key in keys), order)


def list_varying(origins: Iterable[Origin]) -> list[str]:
    """Return the names of the software packages whose version differs between these runs."""
    known = [dict(one.versions) for one in origins]
    names = dict.fromkeys(name for one in known for name in one)
    return [name for name in names if len({one.get(name) for one in known}) > 1]


def _split_version(text: str) -> tuple[tuple[int, ...], str]:
    """Return a sort key for a software version. The key compares the numbers in the version, so that 2.10 comes after
    2.9."""
    return tuple(map(int, _DIGITS.findall(text))), text


def describe_other_differences(before: Origin, after: Origin, by: By) -> str:
    """Describe how the versions and commits of two runs differ. The property that forms the history's axis (`by`) is
    not described. Empty if no other difference is known."""
    differ = []
    if by != "version":
        old, new = dict(before.versions), dict(after.versions)
        names = list_varying([before, after])
        differ += [f"{name} {old.get(name, 'none')} → {new.get(name, 'none')}" for name in names]
    if by != "commit" and before.commit != after.commit and before.commit and after.commit:
        differ.append(f"commit {shorten_commit(before.commit)} → {shorten_commit(after.commit)}")
    return ", ".join(differ)


def shorten_commit(key: str) -> str:
    """Return the short form of a commit for display; "with changes" marks uncommitted changes."""
    return key.rstrip("+")[:_SHORT] + " with changes" * key.endswith("+")


# ---------------------------------------- series


def _list_runs(results: Results) -> Iterable[_Run]:
    """Yield the last attempt of every measured repeat of every configuration.

    An attempt is one try at a run. Repeats with equal numbers in different folders count as different repeats, because
    each call of `zeroscale ab` numbers its repeats from 0 in a folder of its own.
    """
    last: dict[tuple[Path, int], tuple[int, Row]] = {}
    for place, row in enumerate(list_rows(results.table)):
        if row["evidence"] == "measured":
            folder = results.get_file(place).parents[1]
            before = last.get((folder, row["repeat"]))
            if before is None or row["attempt"] >= before[1]["attempt"]:
                last[folder, row["repeat"]] = place, row
    for place, row in last.values():
        record = results.record(place)
        yield _Run(place, row, record, find_origin(record))


def _group_by_series(results: Results, runs: Sequence[_Run]) -> list[tuple[str, list[_Run]]]:
    """Return the runs grouped by configuration, machine and kind of device, with a name for each group. A name that two
    groups would share is extended by the device."""
    variants = describe_variants(results.specs)
    has_machines = len(set(results.table["machine"])) > 1
    groups: dict[tuple[str, ...], list[_Run]] = {}
    for run in runs:
        row = run.row | {"variant": variants.get(run.row["config_id"], "")}
        known = run.record.environment.classification if run.record.environment else None
        device = () if known is None else (known.device, f"{known.cores} cores", f"{known.threads} threads")
        parts = [row["model"], format_ranks(row), describe_choice(row), row["precision"]]
        name = " · ".join([*parts, row["machine"]] if has_machines else parts)
        groups.setdefault((name, row["config_id"], row["machine"], *device), []).append(run)
    names = [name for name, *_ in groups]
    return [
        (name if names.count(name) == 1 else " · ".join([name, *device]), members)
        for (name, _, _, *device), members in groups.items()
    ]


def _draft(results: Results, name: str, members: Sequence[_Run], axis: HistoryAxis) -> HistorySeries:
    """Return the series of one configuration, with an empty list of changes. Changes are detected later, for all series
    together."""
    index = {place.key: number for number, place in enumerate(axis.places)}
    times: dict[int, dict[str, list[float]]] = {}
    firsts: dict[int, Origin] = {}
    flagged = failed = 0
    for run in sorted(members, key=lambda one: one.origin.started_at):
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
    first = members[0].row
    return HistorySeries(name, first["config_id"], first["machine"], tuple(values), (), flagged, failed)


def _compute_logs(series: HistorySeries, places: int) -> "np.ndarray[tuple[int], np.dtype[np.float64]]":
    """Return the logarithm of the seconds per sample at each place (commit, version or day), shape (places,). A place
    without a value has NaN."""
    logs = np.full(places, np.nan)
    for one in series.values:
        logs[one.place] = math.log(one.typical)
    return logs


def _compute_geometric_mean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))
