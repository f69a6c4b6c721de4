"""Types of pydantic fields as text, and errors of pydantic as one-line errors for users."""

import difflib
import functools
import json
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from bench.core.errors import UserError, suggest_nearest

_LONG = 60
"""Maximum length of a displayed default value, in characters."""
_SHOWN = 200
"""Maximum length of a value in an error message, in characters."""

_WORDS = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}
_SIGNS = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
_RULES = {
    "missing": "is required and missing",
    "finite_number": "must be a finite number",
    "too_short": "must have at least {min_length} entries",
    "too_long": "must have at most {max_length} entries",
    "string_too_long": "must have at most {max_length} characters",
    # Only names have a pattern.
    "string_pattern_mismatch": "a name is made of letters, digits, '.', '_' and '-', and begins with a letter or digit",
}
"""Rules for error messages by pydantic's error type. For any other error type, the message states the field's type."""


def format_value(value: Any) -> str:
    """Return a value as one line of YAML, cut after 60 characters."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, float):  # shorter than JSON's form, e.g. 1e+12
        return f"{value:g}"
    text = '""' if value == "" else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONG else f"{text[:_LONG]} …"


def format_in_one_line(value: Any) -> str:
    """Return a user's value for an error message: shortened, and with unprintable characters escaped."""
    text = json.dumps(value) if value is None or isinstance(value, bool) else str(value)
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"
    return text if text.isprintable() else repr(text)


def describe_type(schema: Mapping[str, Any], known: Mapping[str, Any], section: str = "") -> str:
    """Return the type that a JSON schema describes, as text. `known` has the definitions that the schema may refer to.
    `section` is the word for a mapping with fixed keys; if it is empty, the text has the name of the mapping's
    class."""
    texts = (_describe_alternative(one, known, section) for one in _list_alternatives(schema, known))
    return " or ".join(dict.fromkeys(texts))


def _describe_alternative(schema: Mapping[str, Any], known: Mapping[str, Any], section: str) -> str:
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{one}`" for one in _list_choices(schema))
    kind = schema.get("type")
    if schema.get("format") == "date":
        return "date such as 2026-11-26"
    if kind == "array":
        items = schema.get("items")
        count = len(schema.get("prefixItems", [])) or "values"
        return f"list of {describe_type(items, known, section and f'{section}s') if items else count}"
    if kind == "object":
        if "properties" in schema:
            return section or str(schema["title"])
        inner = schema.get("additionalProperties")
        return (
            f"mapping to {describe_type(inner, known, section)}" if isinstance(inner, Mapping) and inner else "mapping"
        )
    bounds = [f"{sign} {format_value(schema[name])}" for name, sign in _SIGNS.items() if name in schema]
    return f"{_WORDS.get(str(kind), 'anything')} {', '.join(bounds)}".rstrip()


def _list_choices(schema: Mapping[str, Any]) -> list[Any]:
    return list(schema.get("enum", [schema["const"]] if "const" in schema else []))


def _list_alternatives(schema: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the alternatives of a JSON schema (`anyOf` and others), with references resolved. A value is valid if it
    fulfils one of the alternatives."""
    if "$ref" in schema:
        yield from _list_alternatives(known[str(schema["$ref"]).rpartition("/")[2]], known)
        return
    inner = next((schema[name] for name in ("anyOf", "oneOf", "allOf") if name in schema), None)
    if inner is None:
        yield schema
    for one in inner or ():
        yield from _list_alternatives(one, known)


# ---------------------------------------- errors


class _Field(NamedTuple):
    """Field of a model, or entry of a list or mapping, in which pydantic found an error."""

    schema: Mapping[str, Any]  # JSON schema with the default and the examples
    alternatives: list[Mapping[str, Any]]
    type: str  # as text
    name: str  # dotted, below the model
    declared: str  # the part of `name` up to the last declared key: `betas` for `betas.1`


def build_error(error: ValidationError, kind: type[BaseModel], path: str = "") -> UserError:
    """Return the first error of a pydantic ValidationError as a one-line UserError with value, rule and remedy.

    `kind` is the class that refused the data, and `path` is the dotted key of the data.
    """
    first = select_first(error)
    field = _find_field(kind, first["loc"])
    name, declared = (".".join(filter(None, (path, part))) for part in (field.name, field.declared))
    value, context = first["input"], first.get("ctx", {})
    shown = "" if isinstance(value, Mapping | BaseModel) or "[key]" in first["loc"] else f"={format_in_one_line(value)}"
    if first["type"] in ("value_error", "assertion_error"):
        message = first["msg"].partition(", ")[2]  # written in this project, with its remedy
        if name and message.startswith(f"{name}."):  # a rule between fields of a group, which names them itself
            return UserError("", message)
        return UserError(f"{name}{shown}" if name else "", message[0].lower() + message[1:])
    if first["type"] == "extra_forbidden":
        *above, key = first["loc"]
        known = list_fields(kind, above)
        return UserError(f"{name}.{key}".lstrip("."), "no such key", suggest_nearest(str(key), known) if known else "")
    # Keys of a study are explained without `study.`, as they are written.
    explain = f"`zeroscale explain {declared.removeprefix('study.')}` describes it"
    if rule := _RULES.get(first["type"], "").format(**context):
        return UserError(name if first["type"] == "missing" else f"{name}{shown}", rule, explain)
    text = field.type.replace("`", "")
    article = "one of " if any(map(_list_choices, field.alternatives)) else _find_article(text)
    return UserError(f"{name}{shown}", f"must be {article}{text}", _suggest(name, value, field) or explain)


def select_first(error: ValidationError) -> Any:
    """Return the error to report. One error is reported at a time, since the first wrong value often causes the others.

    An unknown key comes before a missing key, because a misspelt key causes both errors.
    """
    first, *others = error.errors()
    unknown = (
        other for other in others if other["type"] == "extra_forbidden" and other["loc"][:-1] == first["loc"][:-1]
    )
    return next(unknown, first) if first["type"] == "missing" else first


def describe_error(error: ValidationError, kind: type[BaseModel]) -> str:
    """Return the first error as text: value and rule. A remedy is omitted, because a program and not the user wrote the
    data."""
    found = build_error(error, kind)
    return ": ".join(filter(None, (found.value, found.rule)))


def _find_article(text: str) -> str:
    if text.startswith("integer"):
        return "an "
    return "a " if text.startswith(("number", "list", "mapping", "sec", "date")) else ""


def _find_field(kind: type[BaseModel], location: Sequence[Any]) -> _Field:
    """Return the field in which pydantic found an error. `location` is pydantic's path of the error. The path also
    contains names of union members, which are not keys and are skipped."""
    schema = _get_schema(kind)
    known, parts, declared = schema.get("$defs", {}), list[str](), list[str]()
    for part in location:
        alternatives = list(_list_alternatives(schema, known))
        inner = [one["properties"][part] for one in alternatives if part in one.get("properties", {})]
        if inner and len(declared) == len(parts):
            declared.append(str(part))
        if not inner:
            inner = list(filter(None, (_find_entry(one, part) for one in alternatives)))
        if inner:
            schema = inner[0] if len(inner) == 1 else {"anyOf": inner}
            parts.append(str(part))
    text = describe_type(schema, known, "section")
    return _Field(schema, list(_list_alternatives(schema, known)), text, ".".join(parts), ".".join(declared))


@functools.cache  # a folder may have thousands of invalid records
def _get_schema(kind: type[BaseModel]) -> Mapping[str, Any]:
    return kind.model_json_schema()


def _find_entry(schema: Mapping[str, Any], part: Any) -> Mapping[str, Any] | None:
    """Return the JSON schema of an entry of a list or mapping, by its index or key. None if the schema describes no
    such entry."""
    if isinstance(part, int):
        fixed = schema.get("prefixItems", [])
        return fixed[part] if part < len(fixed) else schema.get("items")
    inner = [*schema.get("patternProperties", {}).values(), schema.get("additionalProperties")]
    return inner[0] if isinstance(inner[0], Mapping) and part != "[key]" else None


def _suggest(name: str, value: Any, field: _Field) -> str:
    """Return a remedy for a value of the wrong type: a valid value to set, as text. Empty if the schema suggests no
    value."""
    if examples := field.schema.get("examples"):
        return f"set {name}={examples[0]}, for example"
    if choices := [str(choice) for one in field.alternatives for choice in _list_choices(one)]:
        near = difflib.get_close_matches(str(value), choices, n=1, cutoff=0.55)
        return f"did you mean {near[0]}?" if near else f"set {name}={choices[0]}, for example"
    by_type = {one.get("type"): one for one in field.alternatives}
    is_scalar = not isinstance(value, Mapping | list | tuple | None)
    if "boolean" in by_type:
        return f"set {name}=true or {name}=false"
    if "array" in by_type and is_scalar:
        return f"write a list, such as {name}=[{format_in_one_line(value)}]"
    if number := by_type.get("integer") or by_type.get("number"):
        return _suggest_number(name, value, number) or _suggest_default(name, field.schema.get("default"))
    if "string" in by_type and is_scalar and "format" not in by_type["string"]:  # a date in quotes is no better
        return f"write it in quotes: {name}='\"{format_in_one_line(value)}\"'"
    return ""


def _suggest_number(name: str, value: Any, schema: Mapping[str, Any]) -> str:
    """Return a remedy for a number that is out of bounds or not whole: the nearest valid number, as text. Empty for any
    other value."""
    if isinstance(value, str | bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return ""
    is_whole = schema["type"] == "integer"
    above, below = schema.get("exclusiveMinimum"), schema.get("exclusiveMaximum")
    low = above + 1 if is_whole and above is not None else schema.get("minimum")
    high = below - 1 if is_whole and below is not None else schema.get("maximum")
    if low is not None and value < low:
        return f"set {name}={low} or more"
    if high is not None and value > high:
        return f"set {name}={high} or less"
    if is_whole:
        return f"set {name}={math.floor(value)} or {name}={math.ceil(value)}"
    return f"set {name} above {above}" if above is not None and value <= above else f"set {name} below {below}"


def _suggest_default(name: str, default: Any) -> str:
    is_number = isinstance(default, int | float) and not isinstance(default, bool)
    return f"set {name}={format_value(default)}, for example" if is_number else ""


def list_fields(kind: type[BaseModel], location: Sequence[Any]) -> set[str]:
    """Return the keys of a model class that is nested in the model class `kind`. `location` is the path of the nested
    class: field names, dict keys and list indices. Any dict key or index is accepted."""
    parts = iter(location)
    for part in parts:
        annotation = getattr(kind.model_fields.get(str(part)), "annotation", None)
        inner = list_models(annotation)
        if typing.get_origin(annotation) in (dict, tuple):
            next(parts, None)
        if not inner:
            return set()
        kind = inner[0]
    return {field.alias or name for name, field in kind.model_fields.items()}


def list_models(annotation: Any) -> list[type[BaseModel]]:
    """Return the pydantic classes that a field's annotation names."""
    candidates = [annotation, *getattr(annotation, "__args__", ())]
    return [kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel)]
