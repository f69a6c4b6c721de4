"""What tells two configurations apart that agree in every column: an option of the engine, the attention, the seed …"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

from bench.point_fields import flatten, is_shown
from bench.spec import RunSpec

_PROTOCOL = "measure."


def describe_variants(specs: Mapping[str, RunSpec]) -> dict[str, str]:
    """Return by config_id the fields, with their values, in which configurations of its model and engine differ and
    that no column of the summary shows; empty where there are none. How long a configuration was measured is told only
    of those that nothing else sets apart."""
    fields = {config_id: {name: str(value) for name, value in flatten(spec)} for config_id, spec in specs.items()}
    texts = dict.fromkeys(specs, "")
    for members in _group_specs(specs, lambda one: (specs[one].model.name, specs[one].engine.name)):
        _add_differences(texts, members, fields, lambda name: not (is_shown(name) or name.startswith(_PROTOCOL)))
    shown = {one: tuple(sorted(field for field in fields[one].items() if is_shown(field[0]))) for one in specs}
    for twins in _group_specs(specs, lambda one: (texts[one], shown[one])):
        _add_differences(texts, twins, fields, lambda name: name.startswith(_PROTOCOL))
    return texts


def split_protocol(variant: str) -> tuple[str, tuple[str, ...]]:
    """Return what a variant says is chosen, and the fields by which it was measured otherwise."""
    parts = variant.split(", ")
    protocol = tuple(part for part in parts if part.startswith(_PROTOCOL))
    return ", ".join(part for part in parts if part not in protocol), protocol


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
    return name.removeprefix("engine.options.").removeprefix("model.")
