"""Which configuration of A is set against which of B."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from analysis.compare.fields import Across, Difference, Fields, check, differences, fields, identity, valued
from analysis.early_failures import without_repeated
from analysis.results import Results
from analysis.summary import Row
from analysis.table import plain
from bench.errors import UserError, nearest
from bench.record import Environment


class Configuration(NamedTuple):
    """One row of a summary, with what tells it from others."""

    row: Row
    fields: Fields


class Pair(NamedTuple):
    """What is set against each other, at least one of the two; where `differ` is not empty, in vain."""

    a: Configuration | None
    b: Configuration | None
    differ: tuple[Difference, ...] = ()  # besides what is the question
    asked: tuple[Difference, ...] = ()  # what is


_Groups = dict[tuple[tuple[str, str], ...], list[Configuration]]
"""Configurations by what two must share to be set against each other."""


def configurations(results: Results) -> list[Configuration]:
    """Return the rows of a summary, without early failures of what was tried again."""
    first = results.table["environment_id"].dropna().drop_duplicates()
    environments = {
        environment_id: Environment.model_validate_json(text).classification
        for environment_id, text in zip(first, results.traces["environment"].loc[first.index], strict=True)
    }
    return [
        Configuration(row, fields(row, results.specs[row["config_id"]], environments.get(row["environment_id"])))
        for row in without_repeated(plain(results.summary))
    ]


def pairs(ours: Sequence[Configuration], theirs: Sequence[Configuration], across: Sequence[Across] = ()) -> list[Pair]:
    """Pair what measured the same but for what is `across`, in the order of A and then of B; UserError where `across`
    names no field, or where it leaves several to choose from.

    What differs in protocol, machine or versions besides is paired with its nearest, so that this can be said.
    """
    check(across, [one.fields for one in (*ours, *theirs)])
    a, b = (_grouped(_restricted(side, members, across), across) for side, members in (("A", ours), ("B", theirs)))
    for side, groups in (("A", a), ("B", b)):
        _unambiguous(side, groups, across)
    found = [pair for key, members in a.items() for pair in _matched(members, b.pop(key, []), across)]
    return [*found, *(Pair(None, one) for members in b.values() for one in members)]


def nearest_miss(ours: Sequence[Configuration], theirs: Sequence[Configuration]) -> str:
    """Return what keeps the first configuration of A and its nearest of B apart; empty where one of them is empty."""
    apart = [differences(one.fields, other.fields) for one in ours[:1] for other in theirs]
    return ", ".join(map(str, sorted(apart, key=len)[0])) if apart else ""


def _matched(ours: list[Configuration], theirs: list[Configuration], across: Sequence[Across]) -> Iterator[Pair]:
    """Pair the members of one group: the most alike first, so that whoever has an equal gets it."""
    possible = [_pair(a, b, across) for a in ours for b in theirs]
    left = [*ours, *theirs]
    for pair in sorted(possible, key=lambda pair: len(pair.differ)):
        if pair.a in left and pair.b in left:
            left = [one for one in left if one is not pair.a and one is not pair.b]
            yield pair
    yield from (Pair(one, None) if one in ours else Pair(None, one) for one in left)


def _pair(a: Configuration, b: Configuration, across: Sequence[Across]) -> Pair:
    differ = differences(a.fields, b.fields, across)
    return Pair(a, b, differ, tuple(one for one in differences(a.fields, b.fields) if one not in differ))


def _grouped(members: Sequence[Configuration], across: Sequence[Across]) -> _Groups:
    groups: _Groups = {}
    for one in members:
        groups.setdefault(identity(one.fields, across), []).append(one)
    return groups


def _restricted(side: str, members: Sequence[Configuration], across: Sequence[Across]) -> list[Configuration]:
    """Return those that have the values that were asked for on this side."""
    kept = list(members)
    for one in across:
        if one.values:
            wanted = one.values["AB".index(side)]
            values = {value for member in kept if (value := valued(one.name, member.fields)) is not None}
            kept = [member for member in kept if valued(one.name, member.fields) == wanted]
            if not kept:
                rule = f"{side} has none with {one.name} {wanted}"
                raise UserError(f"--across {one.name}={':'.join(one.values)}", rule, nearest(wanted, values))
    return kept


def _unambiguous(side: str, groups: _Groups, across: Sequence[Across]) -> None:
    """Raise UserError where two of one side differ in nothing but what is across: either could be meant."""
    for members in groups.values() if across else ():
        for number, one in enumerate(members):
            for other in members[:number]:
                if not differences(one.fields, other.fields, across):
                    raise _ambiguous(side, other.fields, one.fields, across)


def _ambiguous(side: str, one: Fields, other: Fields, across: Sequence[Across]) -> UserError:
    names = [part.name for part in across if valued(part.name, one) != valued(part.name, other)]
    name = names[0] if names else differences(one, other)[0].field
    values = f"{valued(name, one)}", f"{valued(name, other)}"
    return UserError(
        f"--across {','.join(part.name for part in across)}",
        f"{side} holds both {values[0]} and {values[1]} of the same point",
        f"choose one for each side, as in --across {name}={values[0]}:{values[1]}",
    )
