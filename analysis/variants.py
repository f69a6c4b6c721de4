"""What tells two configurations apart that agree in every column: an option of the engine, the attention, the seed …"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.spec import RunSpec

_COLUMNS = frozenset({
    "model.name", "engine.name", "engine.backend", "data.name", "batch.micro", "batch.accumulation", "batch.global",
    "nodes", "devices_per_node", "precision", "sequence.encoder", "sequence.decoder", "activation_checkpointing",
})  # fmt: skip


def variants(specs: Mapping[str, RunSpec]) -> dict[str, str]:
    """Return by config_id the fields, with their values, in which configurations of its model and engine differ and
    that no column of the summary shows; empty where there are none."""
    fields = {config_id: dict(_fields(_plain(spec))) for config_id, spec in specs.items()}
    groups: dict[tuple[str, str], list[str]] = {}
    for config_id, spec in specs.items():
        groups.setdefault((spec.model.name, spec.engine.name), []).append(config_id)
    differ = [(members, _differ([fields[member] for member in members])) for members in groups.values()]
    return {one: _told(fields[one], names) for members, names in differ for one in members}


def _differ(members: Sequence[Mapping[str, str]]) -> list[str]:
    names = dict.fromkeys(name for member in members for name in member)
    return [name for name in names if len({member.get(name) for member in members}) > 1]


def _told(fields: Mapping[str, str], names: Sequence[str]) -> str:
    return ", ".join(f"{_short(name)}={fields.get(name, 'default')}" for name in names)


def _plain(spec: RunSpec) -> dict[str, Any]:
    return spec.model_dump(mode="json", by_alias=True, exclude={"model": {"source"}})


def _fields(plain: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    for name, value in plain.items():
        place = f"{path}{name}"
        if isinstance(value, dict):
            yield from _fields(value, f"{place}.")
        elif place not in _COLUMNS:
            yield place, str(value)


def _short(name: str) -> str:
    return name.removeprefix("engine.options.").removeprefix("model.")
