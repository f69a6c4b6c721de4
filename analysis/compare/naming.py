"""What people call a pair: model, ranks, engine, micro-batch, and whatever else sets it apart from the others."""

from collections.abc import Iterator, Sequence

from analysis.compare.fields import Fields
from analysis.compare.pairing import Pair

_MAIN = ("model.name", "nodes", "devices_per_node", "engine.name", "batch.micro")
_IMPLIED = ("model.shape", "model.parameters", "model.family", "engine.backend", "device", "container")


def names(pairs: Sequence[Pair]) -> list[str]:
    """Return what each pair is called; a part that is not the same in A and in B stands as `this → that`."""
    told = [_told(pair) for pair in pairs]
    kin: dict[tuple[str, ...], list[Fields]] = {}
    for fields in told:
        kin.setdefault(_kind(fields), []).append(fields)
    varying = {kind: set(_varying(members)) for kind, members in kin.items()}
    return [
        " · ".join([*_main(pair), *(_part(name, fields) for name in fields if name in varying[_kind(fields)])])
        for pair, fields in zip(pairs, told, strict=True)
    ]


def _told(pair: Pair) -> Fields:
    """Return the fields by which a pair is told: those of A, or of B where there is no A."""
    one = pair.a or pair.b
    assert one is not None
    return one.fields


def _kind(fields: Fields) -> tuple[str, ...]:
    return fields["model.name"], fields["engine.name"]


def _varying(members: Sequence[Fields]) -> Iterator[str]:
    for name in dict.fromkeys(name for fields in members for name in fields):
        told_anyhow = name in _MAIN or any(name.startswith(prefix) for prefix in _IMPLIED)
        if not told_anyhow and len({fields.get(name) for fields in members}) > 1:
            yield name


def _main(pair: Pair) -> list[str]:
    a, b = (pair.a or pair.b), (pair.b or pair.a)
    assert a is not None and b is not None
    ours, theirs = _words(a.fields), _words(b.fields)
    return [one if one == other else f"{one} → {other}" for one, other in zip(ours, theirs, strict=True)]


def _words(fields: Fields) -> list[str]:
    nodes, devices = fields["nodes"], fields["devices_per_node"]
    ranks = f"{nodes} × {devices} ranks" if nodes != "1" else f"{devices} rank{'s' if devices != '1' else ''}"
    return [fields["model.name"], ranks, fields["engine.name"], f"micro {fields['batch.micro']}"]


def _part(name: str, fields: Fields) -> str:
    return f"{name.removeprefix('engine.options.')}={fields.get(name, 'none')}"
