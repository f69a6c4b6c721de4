"""What sets two configurations apart, field by field, and which differences are the question."""

import json
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from analysis.summary import Row
from bench.core.errors import UserError, suggest_nearest
from bench.core.point_fields import flatten, select
from bench.core.record import EnvironmentClass
from bench.core.spec import RunSpec

Fields = dict[str, str]
"""By dotted name, as text: those of the spec (`engine.options.stage`) and of what it met (`versions.torch`)."""

_CIRCUMSTANCE = ("measure", "machine", "evidence")
_ENVIRONMENT = ("device", "container", "versions")
_SAME_THING = {"machine": ("machine", "device")}  # a machine is what it is called and what is in it


class VariedField(NamedTuple):
    """A field, or all below it, in which A and B may differ; with `values`, what it is in A and what it is in B."""

    name: str
    values: tuple[str, str] | None = None

    def covers(self, field: str) -> bool:
        """Whether `field` is this one or below it."""
        return any(_is_at_or_below(field, name) for name in _SAME_THING.get(self.name, (self.name,)))


class FieldDifference(NamedTuple):
    """A field that is not the same in A and in B; None where a side has no such field."""

    field: str
    a: str | None
    b: str | None

    def __str__(self) -> str:
        return f"{self.field} {self.a or 'none'} → {self.b or 'none'}"


def list_fields(row: Row, spec: RunSpec, environment: EnvironmentClass | None) -> Fields:
    """Return the fields of a row of the summary; those of its environment only where that is known."""
    plain = select(spec.model_dump(mode="json", by_alias=True), "identity")
    plain |= {"objective": spec.objective, "parallel": spec.parallel.model_dump()}
    met: dict[str, Any] = {"machine": row["machine"], "evidence": row["evidence"]}
    if environment:
        met |= environment.model_dump(mode="json", include=set(_ENVIRONMENT))
    flat = flatten(plain | met)
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in flat if value is not None}


def parse_across(text: str) -> tuple[VariedField, ...]:
    """Parse `FIELD[=A:B][,FIELD…]`."""
    return tuple(_parse_varied_field(part.strip()) for part in text.split(",") if part.strip())


def check_across(across: Iterable[VariedField], known: Iterable[Fields]) -> None:
    """Raise UserError for a field that no configuration has, nor any other could have."""
    names = {name for one in known for field in one for name in _list_prefixes(field)}
    names |= {*RunSpec.model_fields, *_CIRCUMSTANCE, *_ENVIRONMENT}
    for one in across:
        if one.name not in names:
            raise UserError(f"--across {one.name}", "no such field", suggest_nearest(one.name, names))


def find_value(name: str, one: Fields) -> str | None:
    """Return the value of a field; that of `engine` is its name."""
    return one.get(name, one.get(f"{name}.name"))


def build_pairing_key(one: Fields, across: Iterable[VariedField]) -> tuple[tuple[str, str], ...]:
    """Return what two configurations must share to be set against each other at all: what was measured, without what
    is the question, the protocol and what it met."""
    across = tuple(across)
    return tuple(sorted(
        (field, value) for field, value in one.items()
        if not any(_is_at_or_below(field, part) for part in (*_CIRCUMSTANCE, *_ENVIRONMENT))
        and not any(part.covers(field) for part in across)
    ))  # fmt: skip


def list_differences(a: Fields, b: Fields, across: Iterable[VariedField] = ()) -> tuple[FieldDifference, ...]:
    """Return the fields in which A and B differ, those across left out. An environment that nobody knows differs in
    nothing."""
    names, across = sorted(a.keys() | b.keys()), tuple(across)
    if not (_has_environment(a) and _has_environment(b)):
        names = [name for name in names if not any(_is_at_or_below(name, part) for part in _ENVIRONMENT)]
    return tuple(
        FieldDifference(name, a.get(name), b.get(name))
        for name in names
        if a.get(name) != b.get(name) and not any(part.covers(name) for part in across)
    )


def name_across(differences: Iterable[FieldDifference]) -> str:
    """Return what `--across` would have to name for these differences to be the question: a machine and its device as
    one, of several versions or several keys of the protocol all."""
    fields = dict.fromkeys(one.field for one in differences)
    names = {"machine" if field in _SAME_THING["machine"] else field: None for field in fields}
    for part in ("versions", "measure"):
        below = [name for name in names if _is_at_or_below(name, part)]
        if len(below) > 1:
            names = {part if name in below else name: None for name in names}
    return ",".join(names)


def _parse_varied_field(part: str) -> VariedField:
    name, equals, values = part.partition("=")
    if not equals:
        return VariedField(name)
    a, colon, b = values.partition(":")
    if not (a and colon and b):
        raise UserError(f"--across {part}", "not FIELD=A:B", f"write what it is in A and in B, as in {name}=this:that")
    return VariedField(name, (a, b))


def _has_environment(one: Fields) -> bool:
    return "device" in one


def _is_at_or_below(field: str, name: str) -> bool:
    return field == name or field.startswith(f"{name}.")


def _list_prefixes(field: str) -> Iterator[str]:
    parts = field.split(".")
    yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
