"""What tells two configurations apart that agree in every column: an option of the engine, the attention, the seed …"""

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

from bench.point_fields import flatten, is_shown
from bench.spec import RunSpec

_PROTOCOL = "measure."


def describe_variants(
    specs: Mapping[str, RunSpec], machines: Mapping[str, Collection[str]] | None = None
) -> dict[str, str]:
    """Return by config_id the fields, with their values, in which configurations of its model, engine and data differ
    and that no column of the summary shows; empty where there are none.

    How long a configuration was measured names only those that differ in nothing else and were measured on the same
    machine, for `machines` by config_id show that apart: for the others `describe_protocol` says it once.
    """
    fields = {config_id: {name: str(value) for name, value in flatten(spec)} for config_id, spec in specs.items()}
    texts = dict.fromkeys(specs, "")
    for members in _group_specs(
        specs, lambda one: (specs[one].model.name, specs[one].engine.name, specs[one].data.name)
    ):
        differ = _list_differing(members, fields)
        _add_values(
            texts, members, fields, [name for name in differ if not (is_shown(name) or name.startswith(_PROTOCOL))]
        )
    for members in _group_specs(specs, lambda one: _select_measured(fields[one])):
        together = members if machines is None else _select_together(members, machines)
        differ = _list_differing(together, fields)
        telling = (one for one in differ if len({fields[member][one] for member in together}) == len(together))
        one_is_enough = next(telling, None)
        _add_values(texts, together, fields, [one_is_enough] if one_is_enough else differ)
    return texts


def describe_protocol(specs: Iterable[RunSpec]) -> str:
    """Return the fields of the protocol in which configurations differ, each with its values; empty where all were
    measured alike."""
    values: dict[str, dict[str, None]] = {}
    for spec in specs:
        for name, value in flatten(spec.measure):
            values.setdefault(name, {})[str(value)] = None
    return "; ".join(f"{name} {', '.join(found)}" for name, found in values.items() if len(found) > 1)


def _select_measured(fields: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    """Return the fields that say what is measured, not how long."""
    return frozenset((name, value) for name, value in fields.items() if not name.startswith(_PROTOCOL))


def _group_specs(specs: Iterable[str], key: Callable[[str], Hashable]) -> list[list[str]]:
    groups: dict[Hashable, list[str]] = {}
    for one in specs:
        groups.setdefault(key(one), []).append(one)
    return list(groups.values())


def _select_together(members: Sequence[str], machines: Mapping[str, Collection[str]]) -> list[str]:
    """Return those that another of them was measured beside, on the same machine."""
    counts = Counter(machine for member in members for machine in machines[member])
    return [member for member in members if any(counts[machine] > 1 for machine in machines[member])]


def _list_differing(members: Sequence[str], fields: Mapping[str, Mapping[str, str]]) -> list[str]:
    """Return the fields in which members differ."""
    names = dict.fromkeys(name for member in members for name in fields[member])
    return [name for name in names if len({fields[member].get(name) for member in members}) > 1]


def _add_values(
    texts: dict[str, str], members: Sequence[str], fields: Mapping[str, Mapping[str, str]], names: Sequence[str]
) -> None:
    """Add the values of these fields to what is told of each member."""
    for member in members:
        more = (f"{_shorten_name(name)}={fields[member].get(name, 'default')}" for name in names)
        texts[member] = ", ".join(filter(None, [texts[member], *more]))


def _shorten_name(name: str) -> str:
    return name.removeprefix("engine.options.").removeprefix("model.").removeprefix(_PROTOCOL)
