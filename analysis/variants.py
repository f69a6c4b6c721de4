"""What tells two configurations apart that agree in every column: an option of the engine, the attention, the seed …"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from bench.point_fields import flatten, is_shown
from bench.spec import RunSpec

_PROTOCOL = "measure."


def describe_variants(specs: Mapping[str, RunSpec]) -> dict[str, str]:
    """Return by config_id the fields, with their values, in which configurations of its model, engine and data differ
    and that no column of the summary shows; empty where there are none. How long a configuration was measured names
    only those that differ in nothing else: for the others `describe_protocol` says that once."""
    fields = {config_id: {name: str(value) for name, value in flatten(spec)} for config_id, spec in specs.items()}
    texts = dict.fromkeys(specs, "")
    for members in _group_specs(
        specs, lambda one: (specs[one].model.name, specs[one].engine.name, specs[one].data.name)
    ):
        _add_differences(texts, members, fields, lambda name: not (is_shown(name) or name.startswith(_PROTOCOL)))
    for members in _group_specs(specs, lambda one: _select_measured(fields[one])):
        _add_differences(texts, members, fields, lambda name: name.startswith(_PROTOCOL))
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


def _add_differences(
    texts: dict[str, str],
    members: Sequence[str],
    fields: Mapping[str, Mapping[str, str]],
    counts: Callable[[str], bool],
) -> None:
    """Add to what is told of each member the fields that count and in which they differ."""
    names = dict.fromkeys(name for member in members for name in fields[member] if counts(name))
    differ = [name for name in names if len({fields[member].get(name) for member in members}) > 1]
    for member in members:
        more = (f"{_shorten_name(name)}={fields[member].get(name, 'default')}" for name in differ)
        texts[member] = ", ".join(filter(None, [texts[member], *more]))


def _shorten_name(name: str) -> str:
    return name.removeprefix("engine.options.").removeprefix("model.").removeprefix(_PROTOCOL)
