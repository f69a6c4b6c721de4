"""Which configuration of A is set against which of B, and what people call a pair."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from analysis.compare.fields import (
    FieldDifference,
    Fields,
    VariedField,
    build_pairing_key,
    check_across,
    find_value,
    list_differences,
    list_fields,
)
from analysis.questions import drop_retried
from analysis.results import Results
from analysis.summary import Row
from analysis.table import list_rows
from bench.core.errors import UserError, suggest_nearest
from bench.core.record import Environment


class ComparedConfiguration(NamedTuple):
    """One row of a summary, with what tells it from others."""

    row: Row
    fields: Fields


class ConfigurationPair(NamedTuple):
    """What is set against each other, at least one of the two; where `differ` is not empty, in vain."""

    a: ComparedConfiguration | None
    b: ComparedConfiguration | None
    differ: tuple[FieldDifference, ...] = ()  # besides what is the question
    intended: tuple[FieldDifference, ...] = ()  # what is


_Groups = dict[tuple[tuple[str, str], ...], list[ComparedConfiguration]]
"""Configurations by what two must share to be set against each other."""


def list_configurations(results: Results) -> list[ComparedConfiguration]:
    """Return the rows of a summary, without early failures of what was tried again."""
    first = results.table["environment_id"].dropna().drop_duplicates()
    environments = {
        environment_id: Environment.model_validate_json(text).classification
        for environment_id, text in zip(first, results.traces["environment"].loc[first.index], strict=True)
    }
    return [
        ComparedConfiguration(
            row, list_fields(row, results.specs[row["config_id"]], environments.get(row["environment_id"]))
        )
        for row in drop_retried(list_rows(results.summary))
    ]


def pair_configurations(
    ours: Sequence[ComparedConfiguration], theirs: Sequence[ComparedConfiguration], across: Sequence[VariedField] = ()
) -> list[ConfigurationPair]:
    """Pair what measured the same but for what is `across`, in the order of A and then of B; UserError where `across`
    names no field, or where it leaves several to choose from.

    What differs in protocol, machine or versions besides is paired with its nearest, so that this can be said.
    """
    check_across(across, [one.fields for one in (*ours, *theirs)])
    a, b = (
        _group_by_identity(_select_members(side, members, across), across)
        for side, members in (("A", ours), ("B", theirs))
    )
    for side, groups in (("A", a), ("B", b)):
        _check_unambiguous(side, groups, across)
    found = [pair for key, members in a.items() for pair in _match_members(members, b.pop(key, []), across)]
    return [*found, *(ConfigurationPair(None, one) for members in b.values() for one in members)]


def describe_nearest_miss(ours: Sequence[ComparedConfiguration], theirs: Sequence[ComparedConfiguration]) -> str:
    """Return what keeps the first configuration of A and its nearest of B apart; empty where one of them is empty."""
    differing = [list_differences(one.fields, other.fields) for one in ours[:1] for other in theirs]
    return ", ".join(map(str, sorted(differing, key=len)[0])) if differing else ""


def _match_members(
    ours: list[ComparedConfiguration], theirs: list[ComparedConfiguration], across: Sequence[VariedField]
) -> Iterator[ConfigurationPair]:
    """Pair the members of one group: the most alike first, so that whoever has an equal gets it."""
    possible = [_build_pair(a, b, across) for a in ours for b in theirs]
    left = [*ours, *theirs]
    for pair in sorted(possible, key=lambda pair: len(pair.differ)):
        if pair.a in left and pair.b in left:
            left = [one for one in left if one is not pair.a and one is not pair.b]
            yield pair
    yield from (ConfigurationPair(one, None) if one in ours else ConfigurationPair(None, one) for one in left)


def _build_pair(a: ComparedConfiguration, b: ComparedConfiguration, across: Sequence[VariedField]) -> ConfigurationPair:
    differ = list_differences(a.fields, b.fields, across)
    return ConfigurationPair(
        a, b, differ, tuple(one for one in list_differences(a.fields, b.fields) if one not in differ)
    )


def _group_by_identity(members: Sequence[ComparedConfiguration], across: Sequence[VariedField]) -> _Groups:
    groups: _Groups = {}
    for one in members:
        groups.setdefault(build_pairing_key(one.fields, across), []).append(one)
    return groups


def _select_members(
    side: str, members: Sequence[ComparedConfiguration], across: Sequence[VariedField]
) -> list[ComparedConfiguration]:
    """Return those that have the values that were asked for on this side."""
    kept = list(members)
    for one in across:
        if one.values:
            wanted = one.values["AB".index(side)]
            values = {value for member in kept if (value := find_value(one.name, member.fields)) is not None}
            kept = [member for member in kept if find_value(one.name, member.fields) == wanted]
            if not kept:
                rule = f"{side} has none with {one.name} {wanted}"
                raise UserError(f"--across {one.name}={':'.join(one.values)}", rule, suggest_nearest(wanted, values))
    return kept


def _check_unambiguous(side: str, groups: _Groups, across: Sequence[VariedField]) -> None:
    """Raise UserError where two of one side differ in nothing but what is across: either could be meant."""
    for members in groups.values() if across else ():
        for number, one in enumerate(members):
            for other in members[:number]:
                if not list_differences(one.fields, other.fields, across):
                    raise _build_ambiguity_error(side, other.fields, one.fields, across)


def _build_ambiguity_error(side: str, one: Fields, other: Fields, across: Sequence[VariedField]) -> UserError:
    names = [part.name for part in across if find_value(part.name, one) != find_value(part.name, other)]
    name = names[0] if names else list_differences(one, other)[0].field
    values = f"{find_value(name, one)}", f"{find_value(name, other)}"
    return UserError(
        f"--across {','.join(part.name for part in across)}",
        f"{side} holds both {values[0]} and {values[1]} of the same point",
        f"choose one for each side, as in --across {name}={values[0]}:{values[1]}",
    )


_MAIN = ("model.name", "nodes", "devices_per_node", "engine.name", "batch.micro")
_IMPLIED = ("model.shape", "model.parameters", "model.family", "engine.backend", "device", "container")


def label_pairs(pairs: Sequence[ConfigurationPair]) -> list[str]:
    """Return what each pair is called; a part that is not the same in A and in B stands as `this → that`."""
    fields_by_pair = [_select_fields(pair) for pair in pairs]
    groups: dict[tuple[str, ...], list[Fields]] = {}
    for fields in fields_by_pair:
        groups.setdefault(_build_group_key(fields), []).append(fields)
    varying = {kind: set(_find_varying_fields(members)) for kind, members in groups.items()}
    return [
        " · ".join(
            [
                *_format_main_parts(pair),
                *(_format_varying_part(name, fields) for name in fields if name in varying[_build_group_key(fields)]),
            ]
        )
        for pair, fields in zip(pairs, fields_by_pair, strict=True)
    ]


def _select_fields(pair: ConfigurationPair) -> Fields:
    """Return the fields by which a pair is told: those of A, or of B where there is no A."""
    one = pair.a or pair.b
    assert one is not None
    return one.fields


def _build_group_key(fields: Fields) -> tuple[str, ...]:
    return fields["model.name"], fields["engine.name"]


def _find_varying_fields(members: Sequence[Fields]) -> Iterator[str]:
    for name in dict.fromkeys(name for fields in members for name in fields):
        is_always_named = name in _MAIN or any(name.startswith(prefix) for prefix in _IMPLIED)
        if not is_always_named and len({fields.get(name) for fields in members}) > 1:
            yield name


def _format_main_parts(pair: ConfigurationPair) -> list[str]:
    a, b = (pair.a or pair.b), (pair.b or pair.a)
    assert a is not None and b is not None
    ours, theirs = _list_main_labels(a.fields), _list_main_labels(b.fields)
    return [one if one == other else f"{one} → {other}" for one, other in zip(ours, theirs, strict=True)]


def _list_main_labels(fields: Fields) -> list[str]:
    nodes, devices = fields["nodes"], fields["devices_per_node"]
    ranks = f"{nodes} × {devices} ranks" if nodes != "1" else f"{devices} rank{'s' if devices != '1' else ''}"
    return [fields["model.name"], ranks, fields["engine.name"], f"micro {fields['batch.micro']}"]


def _format_varying_part(name: str, fields: Fields) -> str:
    return f"{name.removeprefix('engine.options.')}={fields.get(name, 'none')}"
