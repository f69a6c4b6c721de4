"""The keys of a class of values: type, default and meaning, read off the class and the comments beside its fields."""

import json
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bench.config.decode import list_models
from bench.reference import comments


class ConfigKey(NamedTuple):
    """One key of a value."""

    path: str  # dotted
    type: str  # in words
    default: str  # as YAML has it; empty: it has to be given
    meaning: str


def list_keys(
    kind: type[BaseModel],
    prefix: str = "",
    *,
    skip: Collection[str] = (),
    said: Mapping[str, str] | None = None,
    flat: bool = False,
) -> list[ConfigKey]:
    """Return the keys of a class of values, those of values in it after a dot; `said` are meanings that come first."""
    schema, notes = kind.model_json_schema(by_alias=True), comments.read_field_comments(kind)
    found = []
    for name, field in kind.model_fields.items():
        if name in skip or "properties" not in schema:  # a value without names, such as tokens by kind
            continue
        written = field.alias or name
        path = f"{prefix}.{written}" if prefix else written
        inner = [one for one in list_models(field.annotation) if one.__module__.startswith("bench.")]
        meaning = (said or {}).get(path.removeprefix("machine.")) or notes.get(name, "")
        if inner and not flat and _single(field):
            below = list_keys(inner[0], path, said=said)
            optional = [ConfigKey(path, "section or null", "null", meaning)] if field.default is None else []
            found += [*optional, *below]
            continue
        type_text = describe_type(schema["properties"][written], schema.get("$defs", {}))
        if inner and not flat and get_origin(field.annotation) is dict:
            type_text = "sections by name"
        found.append(ConfigKey(path, type_text, _default(field), meaning))
    return found


def _single(field: FieldInfo) -> bool:
    """Whether a field holds one value of a class and not a series of them."""
    annotation = field.annotation
    return isinstance(annotation, type) or type(None) in getattr(annotation, "__args__", ())


def _default(field: FieldInfo) -> str:
    return "" if field.is_required() else format_value(field.get_default(call_default_factory=True))


def format_value(value: Any) -> str:
    """Return a value as YAML has it in one line."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    if isinstance(value, float) and not isinstance(value, bool):
        return f"{value:g}"
    text = '""' if value == "" else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONG else f"{text[:_LONG]} …"


_LONG = 60
"""Characters of a default that are shown."""

_WORDS = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false", "null": "null"}


def describe_type(schema: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """Return a JSON schema in words."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return name if "properties" in known.get(name, {}) else describe_type(known[name], known)
    if "allOf" in schema:
        return describe_type(schema["allOf"][0], known)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(describe_type(one, known) for one in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{one}`" for one in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "array":
        items = schema.get("items") or {}
        return (
            f"list of {describe_type(items, known)}"
            if items
            else f"list of {len(schema.get('prefixItems', [])) or 'values'}"
        )
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"mapping to {describe_type(inner, known)}" if isinstance(inner, Mapping) and inner else "mapping"
    return f"{_WORDS.get(str(kind), 'anything')}{_bounds(schema)}"


def _bounds(schema: Mapping[str, Any]) -> str:
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    bounds = [f"{sign} {format_value(schema[name])}" for name, sign in signs.items() if name in schema]
    return f" {', '.join(bounds)}" if bounds else ""
