"""Fields in which two configurations differ, and fields that `--across` allows to differ."""

import json
from collections.abc import Iterable
from typing import Any, NamedTuple

from analysis.summary import Row
from bench.core.errors import UserError, suggest_nearest
from bench.core.point_fields import flatten, select
from bench.core.record import EnvironmentClass
from bench.core.spec import RunSpec

Fields = dict[str, str]
"""Field values as text, by dotted name: fields of the spec (`engine.options.stage`), the environment (`versions.torch`)
…"""

# Fields that do not identify a spec. A difference in them prevents a comparison unless --across allows it.
_CIRCUMSTANCE = ("measure", "machine", "evidence")
_ENVIRONMENT = ("device", "container", "versions")
# Another machine usually has another device too, so --across machine covers both.
_SAME_THING = {"machine": ("machine", "device")}


class VariedField(NamedTuple):
    """A field that may differ between result sets A and B, together with all fields nested in it. If `values` is (x,
    y), only configurations with value x are selected in A, and only configurations with value y in B."""

    name: str
    values: tuple[str, str] | None = None

    def covers(self, field: str) -> bool:
        """Return True if `field` is this field or is nested in it, as `versions.torch` is in `versions`. The field
        `machine` also covers `device`."""
        return any(_is_at_or_below(field, name) for name in _SAME_THING.get(self.name, (self.name,)))


class FieldDifference(NamedTuple):
    """A field whose value differs between a configuration of result set A and the compared configuration of set B. `a`
    and `b` are the two values; None if that configuration does not have the field."""

    field: str
    a: str | None
    b: str | None

    def __str__(self) -> str:
        return f"{self.field} {self.a or 'none'} → {self.b or 'none'}"


def list_fields(row: Row, spec: RunSpec, environment: EnvironmentClass | None) -> Fields:
    """Return the fields of a summary row: the fields of its spec, its machine, its evidence (measured, rehearsed or
    predicted) and, if known, its environment."""
    plain = select(spec.model_dump(mode="json", by_alias=True), "identity")
    plain |= {"objective": spec.objective, "parallel": spec.parallel.model_dump()}
    met: dict[str, Any] = {"machine": row["machine"], "evidence": row["evidence"]}
    if environment:
        met |= environment.model_dump(mode="json", include=set(_ENVIRONMENT))
    flat = flatten(plain | met)
    return {name: value if isinstance(value, str) else json.dumps(value) for name, value in flat if value is not None}


def parse_across(text: str) -> tuple[VariedField, ...]:
    """Parse the value of `--across`, the fields in which result sets A and B may differ: `FIELD[=A:B][,FIELD…]`. `=A:B`
    names the value in each set; without it, any two values are allowed."""
    return tuple(_parse_varied_field(part.strip()) for part in text.split(",") if part.strip())


def check_across(across: Iterable[VariedField], known: Iterable[Fields]) -> None:
    """Raise UserError if `across` has an unknown field."""
    parts = [field.split(".") for one in known for field in one]
    names = {".".join(part[:end]) for part in parts for end in range(1, len(part) + 1)}
    names |= {*RunSpec.model_fields, *_CIRCUMSTANCE, *_ENVIRONMENT}
    for one in across:
        if one.name not in names:
            raise UserError(f"--across {one.name}", "no such field", suggest_nearest(one.name, names))


def find_value(name: str, one: Fields) -> str | None:
    """Return the value of a field; None if the field does not exist. If `name` is a group of fields, such as `engine`,
    return the name of the selected choice, such as `zero2`."""
    return one.get(name, one.get(f"{name}.name"))


def build_pairing_key(one: Fields, across: Iterable[VariedField]) -> tuple[tuple[str, str], ...]:
    """Return the fields that must be equal for two configurations to be paired. These are the fields of the spec,
    except those of the measurement protocol and those that `across` covers."""
    across = tuple(across)
    return tuple(sorted(
        (field, value) for field, value in one.items()
        if not any(_is_at_or_below(field, part) for part in (*_CIRCUMSTANCE, *_ENVIRONMENT))
        and not any(part.covers(field) for part in across)
    ))  # fmt: skip


def list_differences(a: Fields, b: Fields, across: Iterable[VariedField] = ()) -> tuple[FieldDifference, ...]:
    """Return the fields in which a configuration `a` differs from a configuration `b`, except the fields of `across`.
    If either environment is unknown, environment fields are ignored."""
    names, across = sorted(a.keys() | b.keys()), tuple(across)
    if not ("device" in a and "device" in b):  # either environment is unknown
        names = [name for name in names if not any(_is_at_or_below(name, part) for part in _ENVIRONMENT)]
    return tuple(
        FieldDifference(name, a.get(name), b.get(name))
        for name in names
        if a.get(name) != b.get(name) and not any(part.covers(name) for part in across)
    )


def name_across(differences: Iterable[FieldDifference]) -> str:
    """Return the value of `--across` that permits these differences. Several differing versions become `versions`, and
    several differing protocol settings become `measure`."""
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
        remedy = f"write the values of the field in A and in B, e.g. {name}=this:that"
        raise UserError(f"--across {part}", "must have the form FIELD=A:B", remedy)
    return VariedField(name, (a, b))


def _is_at_or_below(field: str, name: str) -> bool:
    return field == name or field.startswith(f"{name}.")
