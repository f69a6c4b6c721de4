"""What tells two configurations apart that agree in every column: an option of the engine, the attention, the seed …"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

from bench.core.point_fields import flatten, is_shown
from bench.core.spec import RunSpec

_PROTOCOL = "measure."


def describe_variants(specs: Mapping[str, RunSpec]) -> dict[str, str]:
    """Return by config_id the fields, with their values, in which configurations of its model, engine and data differ
    and that no column of the summary shows; empty where there are none. How long a configuration was measured names
    none: `describe_protocol` says that once, and `tell_apart` where nothing else sets two rows apart."""
    fields = {config_id: {name: str(value) for name, value in flatten(spec)} for config_id, spec in specs.items()}
    texts = dict.fromkeys(specs, "")
    for members in _group_specs(
        specs, lambda one: (specs[one].model.name, specs[one].engine.name, specs[one].data.name)
    ):
        _add_differences(texts, members, fields, lambda name: not (is_shown(name) or name.startswith(_PROTOCOL)))
    return texts


def describe_protocol(specs: Iterable[RunSpec]) -> str:
    """Return the fields of the protocol in which configurations differ, each with its values; empty where all were
    measured alike."""
    values: dict[str, dict[str, None]] = {}
    for spec in specs:
        for name, value in flatten(spec.measure):
            values.setdefault(name, {})[str(value)] = None
    return "; ".join(f"{name} {', '.join(found)}" for name, found in values.items() if len(found) > 1)


def tell_apart(
    rows: Sequence[dict[str, Any]], specs: Mapping[str, RunSpec], name: Callable[[dict[str, Any]], Hashable]
) -> list[dict[str, Any]]:
    """Return rows of a summary, each with a `protocol`: where several have one name, what they differ in by protocol,
    one field where one is enough. It names rows of a table; figures have them as one series."""
    groups: dict[Hashable, dict[str, None]] = {}
    for row in rows:
        groups.setdefault(name(row), {})[row["config_id"]] = None
    texts: dict[str, str] = {}
    for members in groups.values():
        fields = {member: {one: str(value) for one, value in flatten(specs[member].measure)} for member in members}
        differ = _list_differing(list(members), fields) if len(members) > 1 else []
        telling = [one for one in differ if len({fields[member][one] for member in members}) == len(members)]
        for member in members if differ else ():
            texts[member] = ", ".join(f"{one}={fields[member][one]}" for one in telling[:1] or differ)
    return [row | {"protocol": texts.get(row["config_id"], "")} for row in rows]


def _group_specs(specs: Iterable[str], key: Callable[[str], Hashable]) -> list[list[str]]:
    groups: dict[Hashable, list[str]] = {}
    for one in specs:
        groups.setdefault(key(one), []).append(one)
    return list(groups.values())


def _list_differing(members: Sequence[str], fields: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the fields in which members differ."""
    names = dict.fromkeys(name for member in members for name in fields[member])
    return [name for name in names if len({fields[member].get(name) for member in members}) > 1]


def _add_differences(
    texts: dict[str, str],
    members: Sequence[str],
    fields: Mapping[str, Mapping[str, str]],
    counts: Callable[[str], bool],
) -> None:
    """Add to what is told of each member the fields that count and in which they differ."""
    differ = [name for name in _list_differing(members, fields) if counts(name)]
    for member in members:
        more = (f"{_shorten_name(name)}={fields[member].get(name, 'default')}" for name in differ)
        texts[member] = ", ".join(filter(None, [texts[member], *more]))


def _shorten_name(name: str) -> str:
    return name.removeprefix("engine.options.").removeprefix("model.")
