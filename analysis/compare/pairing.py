"""Pairing of the configurations of result set A with the configurations of result set B, and names of the pairs."""

import itertools
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
from analysis.questions import drop_retried, format_ranks
from analysis.results import Results
from analysis.summary import Row
from analysis.table import group_by, list_rows
from bench.core.errors import UserError, suggest_nearest
from bench.core.record import Environment


class ComparedConfiguration(NamedTuple):
    """A row of the summary table, with its fields by dotted name."""

    row: Row
    fields: Fields


class ConfigurationPair(NamedTuple):
    """A configuration of result set A and the configuration of result set B that it is compared with. One of them is
    None if it has no counterpart."""

    a: ComparedConfiguration | None
    b: ComparedConfiguration | None
    differ: tuple[FieldDifference, ...] = ()  # differences that prevent a comparison
    intended: tuple[FieldDifference, ...] = ()  # differences that --across allows


_Groups = dict[tuple[tuple[str, str], ...], list[ComparedConfiguration]]
"""Configurations grouped by the fields that must be equal for two configurations to be paired."""


def list_configurations(results: Results) -> list[ComparedConfiguration]:
    """Return the rows of the summary table with their fields. Attempts that failed before their environment was
    recorded are omitted if the same configuration was tried again."""
    # Environments of one class agree in all compared fields, so parsing one environment per class is enough.
    first = results.table["environment_id"].dropna().drop_duplicates()
    environments = {
        environment_id: Environment.model_validate_json(text).classification
        for environment_id, text in zip(first, results.traces["environment"].loc[first.index], strict=True)
    }
    found = []
    for row in drop_retried(list_rows(results.summary)):
        fields = list_fields(row, results.specs[row["config_id"]], environments.get(row["environment_id"]))
        found.append(ComparedConfiguration(row, fields))
    return found


def pair_configurations(
    ours: Sequence[ComparedConfiguration], theirs: Sequence[ComparedConfiguration], across: Sequence[VariedField] = ()
) -> list[ConfigurationPair]:
    """Return the pairs of configurations of two result sets, A (`ours`) and B (`theirs`). Pairs are in the order of
    `ours`; configurations of B without a counterpart follow.

    The two configurations of a pair may differ in the fields of `across`. They may also differ in measurement protocol,
    machine or versions, so that these differences can be reported. All their other fields are equal. If a configuration
    has several possible counterparts, it is paired with the most similar one.

    Raise UserError if a field of `across` does not exist, or if two configurations of one set differ only in the fields
    of `across`.
    """
    check_across(across, [one.fields for one in (*ours, *theirs)])
    a, b = (_group_members(side, members, across) for side, members in (("A", ours), ("B", theirs)))
    found = [pair for key, members in a.items() for pair in _match_members(members, b.pop(key, []), across)]
    return [*found, *(ConfigurationPair(None, one) for members in b.values() for one in members)]


def describe_nearest_miss(ours: Sequence[ComparedConfiguration], theirs: Sequence[ComparedConfiguration]) -> str:
    """Describe how the first configuration of result set A (`ours`) differs from the most similar configuration of set
    B (`theirs`); empty if A or B has no configuration."""
    differing = [list_differences(one.fields, other.fields) for one in ours[:1] for other in theirs]
    return ", ".join(map(str, sorted(differing, key=len)[0])) if differing else ""


def _match_members(
    ours: list[ComparedConfiguration], theirs: list[ComparedConfiguration], across: Sequence[VariedField]
) -> Iterator[ConfigurationPair]:
    """Yield pairs of a configuration of result set A (`ours`) and a configuration of result set B (`theirs`). Fields in
    `across` are allowed to differ. Pairs with the fewest differences in other fields come first. Configurations without
    a counterpart come last."""
    possible = []
    for a, b in itertools.product(ours, theirs):
        differ = list_differences(a.fields, b.fields, across)
        intended = tuple(one for one in list_differences(a.fields, b.fields) if one not in differ)
        possible.append(ConfigurationPair(a, b, differ, intended))
    # Greedy: pairs with the fewest differences come first, so that equal configurations are paired.
    left = [*ours, *theirs]
    for pair in sorted(possible, key=lambda pair: len(pair.differ)):
        if pair.a in left and pair.b in left:
            left = [one for one in left if one is not pair.a and one is not pair.b]
            yield pair
    yield from (ConfigurationPair(one, None) if one in ours else ConfigurationPair(None, one) for one in left)


def _select_members(
    side: str, members: Sequence[ComparedConfiguration], across: Sequence[VariedField]
) -> list[ComparedConfiguration]:
    """Return the configurations that have the values that `across` selects for side "A" or "B".

    Raise UserError if there are none.
    """
    kept = list(members)
    for one in across:
        if one.values:
            wanted = one.values["AB".index(side)]
            values = {value for member in kept if (value := find_value(one.name, member.fields)) is not None}
            kept = [member for member in kept if find_value(one.name, member.fields) == wanted]
            if not kept:
                rule = f"{side} has no configuration with {one.name}={wanted}"
                raise UserError(f"--across {one.name}={':'.join(one.values)}", rule, suggest_nearest(wanted, values))
    return kept


def _group_members(side: str, members: Sequence[ComparedConfiguration], across: Sequence[VariedField]) -> _Groups:
    """Return the configurations of a result set that `across` selects, grouped by the fields that must be equal for two
    configurations to be paired. `side` names the set, "A" or "B".

    Raise UserError if two configurations differ only in the fields `across`, which may differ between the two compared
    sets. It would then be unclear which of the two configurations to compare with the other set.
    """
    groups = group_by(_select_members(side, members, across), lambda one: build_pairing_key(one.fields, across))
    for group in groups.values() if across else ():
        for other, one in itertools.combinations(group, 2):
            if not list_differences(one.fields, other.fields, across):
                raise _build_ambiguity_error(side, other.fields, one.fields, across)
    return groups


def _build_ambiguity_error(side: str, one: Fields, other: Fields, across: Sequence[VariedField]) -> UserError:
    names = [part.name for part in across if find_value(part.name, one) != find_value(part.name, other)]
    name = names[0] if names else list_differences(one, other)[0].field
    values = f"{find_value(name, one)}", f"{find_value(name, other)}"
    rule = f"{side} has the same point with {name}={values[0]} and with {name}={values[1]}"
    remedy = f"choose a value for A and for B, e.g. --across {name}={values[0]}:{values[1]}"
    return UserError(f"--across {','.join(part.name for part in across)}", rule, remedy)


_MAIN = ("model.name", "nodes", "devices_per_node", "engine.name", "batch.micro")
_IMPLIED = ("model.shape", "model.parameters", "model.family", "engine.backend", "device", "container")


def label_pairs(pairs: Sequence[ConfigurationPair]) -> list[str]:
    """Return the name of each pair. A field that differs is written as `value in A → value in B`, where A and B are the
    two compared result sets."""

    def get_kind(fields: Fields) -> tuple[str, str]:
        return fields["model.name"], fields["engine.name"]

    groups = group_by(map(_get_fields, pairs), get_kind)
    varying = {kind: set(_list_varying_fields(members)) for kind, members in groups.items()}
    labels = []
    for pair in pairs:
        fields = _get_fields(pair)
        both = zip(_list_main_labels(fields), _list_main_labels(pair.b.fields if pair.b else fields), strict=True)
        names = [name for name in fields if name in varying[get_kind(fields)]]
        more = [f"{name.removeprefix('engine.options.')}={fields[name]}" for name in names]
        labels.append(" · ".join([*(one if one == other else f"{one} → {other}" for one, other in both), *more]))
    return labels


def _get_fields(pair: ConfigurationPair) -> Fields:
    """Return the fields that give a pair its name. They come from the configuration of result set A or, if the pair has
    no configuration of A, from the configuration of B."""
    one = pair.a or pair.b
    assert one is not None
    return one.fields


def _list_varying_fields(members: Sequence[Fields]) -> Iterator[str]:
    for name in dict.fromkeys(name for fields in members for name in fields):
        is_always_named = name in _MAIN or any(name.startswith(prefix) for prefix in _IMPLIED)
        if not is_always_named and len({fields.get(name) for fields in members}) > 1:
            yield name


def _list_main_labels(fields: Fields) -> list[str]:
    ranks = format_ranks({name: int(fields[name]) for name in ("nodes", "devices_per_node")})
    return [fields["model.name"], ranks, fields["engine.name"], f"micro {fields['batch.micro']}"]
