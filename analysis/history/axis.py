"""The places of a history: the commits, the versions or the days that runs were of, in their order."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from bench.record import RunRecord

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
        return _build(by, sorted(firsts), firsts, {}, "by the calendar, UTC")
    if by == "version":
        names = list_varying(firsts.values())
        ordered = sorted(firsts, key=lambda key: _sort_versions(firsts[key], names))
        return _build(by, ordered, firsts, {key: _name_versions(firsts[key], names) for key in firsts}, "by number")
    known = list(ancestry([key.rstrip("+") for key in firsts]))
    if {key.rstrip("+") for key in firsts} <= set(known):
        ordered = sorted(firsts, key=lambda key: (known.index(key.rstrip("+")), key))
        return _build(by, ordered, firsts, _shorten(firsts), "ancestors first, as git has it")
    return _build(by, list(firsts), firsts, _shorten(firsts), "in the order in which they were first measured")


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


def _build(
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
