"""What people call a pair: model, ranks, engine, micro-batch, and whatever else sets it apart from the others."""

from collections.abc import Iterator, Sequence

from analysis.compare.fields import Fields
from analysis.compare.pairing import ConfigurationPair

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
