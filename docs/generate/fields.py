"""What a value holds: its keys with type, default and meaning, read off its class and its comments."""

import inspect
import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bench import data, engines, launchers, models, plugins
from bench.config.decode import list_models
from bench.machine import Machine
from bench.record import RunRecord
from bench.spec import DataSpec, EngineSpec, ModelSpec, RunSpec
from bench.study import Study
from docs.generate import comments
from docs.generate.markdown import code, plain, table

_CONF = Path(__file__).parents[2] / "conf"


class ConfigKey(NamedTuple):
    """One key of a value."""

    path: str
    type: str
    default: str
    meaning: str


# ---------------------------------------- the page of the config


def config_page() -> str:
    """Return every key that a run, a sweep or a study can be given."""
    groups = {"model", "engine", "data", "objective"}
    file = _CONF / "config.yaml"
    own = [_as_in(file, key) for key in keys(RunSpec, skip=groups, said=comments.read_key_comments(file))]
    parts = [
        "# Config keys\n\n"
        "A key is given as `KEY=VALUE` on the command line, or in a file of your own folder: `--config-dir`. *Default* "
        "is what a key is where neither the command line nor a group's file says it; what the files that ship say is "
        "in brackets. A number in a type is a bound.",
        "## The run\n\n`conf/config.yaml`\n\n" + _table(own),
        *_group("model", ModelSpec, "family", "Shape", plugins.FAMILY, models, {"shape"}, "model.shape"),
        *_group("engine", EngineSpec, "backend", "Options", plugins.ENGINE, engines, {"options"}, "engine"),
        "## `objective`\n\nOne of " + ", ".join(map(code, _files("objective"))) + ". Its lengths are `sequence.KIND`.",
        *_group("data", DataSpec, "source", "Options", plugins.DATA, data, {"options"}, "data"),
        "## `machine`\n\nFiles that ship: " + ", ".join(map(code, _files("machine"))) + ".\n\n"
        + _doc(Machine) + "\n\n" + _table(keys(Machine, "machine")),
        "## `launcher`\n\nFiles that ship: " + ", ".join(map(code, _files("launcher"))) + ".",
        *(_launcher(name) for name in plugins.list_names(plugins.LAUNCHER)),
        "## A study\n\nA file of `conf/study`, or of your own: `study=my.yaml`. Files that ship: "
        + ", ".join(map(code, _files("study"))) + ".\n\n" + _doc(Study) + "\n\n" + _table(keys(Study)),
    ]  # fmt: skip
    return "\n\n".join(parts)


def _as_in(file: Path, key: ConfigKey) -> ConfigKey:
    """Return a key with the default that a file gives it."""
    value: Any = yaml.safe_load(file.read_text())
    for part in key.path.split("."):
        value = value.get(part, key) if isinstance(value, Mapping) else key
    return key if value is key or value == {} else key._replace(default=_shown(value))


def _group(
    group: str, spec: type[BaseModel], by: str, part: str, kind: Any, package: Any, skip: set[str], prefix: str
) -> Iterator[str]:
    """Yield a group's own keys, and those of every plug-in that its key `by` may name."""
    said = comments.read_key_comments(*sorted((_CONF / "data").glob("*.yaml"))) if group == "data" else {}
    yield f"## `{group}`\n\nFiles that ship: {', '.join(map(code, _files(group)))}.\n\n{_doc(spec)}"
    yield _table(keys(spec, group, skip=skip, said=said))
    for name in plugins.list_names(kind):
        found = keys(getattr(package.load(name), part), prefix, said=said)
        written = [key._replace(meaning=_with_files(key, group, by, name)) for key in found]
        yield f"### `{group}.{by}={name}`\n\n{_table(written) if written else 'No keys of its own.'}"


def _launcher(name: str) -> str:
    said = {
        key: note
        for key, note in comments.read_key_comments(_CONF / "launcher" / f"{name}.yaml").items()
        if key != "launcher.name"
    }
    return f"### `launcher={name}`\n\n{_table(keys(launchers.load(name).Options, 'launcher', said=said))}"


def _files(group: str) -> list[str]:
    return sorted(path.stem for path in (_CONF / group).glob("*.yaml"))


def _with_files(key: ConfigKey, group: str, by: str, name: str) -> str:
    """Return a key's meaning, and what the files that ship say instead of its default."""
    said: dict[str, list[str]] = {}
    for file in _files(group):
        plain_file = yaml.safe_load((_CONF / group / f"{file}.yaml").read_text())
        value: Any = plain_file if plain_file.get(by) == name else {}
        for part in key.path.split(".")[1:]:
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and _shown(value) != key.default and group == "engine":
            said.setdefault(_shown(value), []).append(file)
    files = "; ".join(f"{', '.join(names)}: {value}" for value, names in said.items())
    return f"{key.meaning} ({files})".strip() if files else key.meaning


# ---------------------------------------- the page of the record


def record_page() -> str:
    """Return what `record.json` holds, value by value."""
    found: dict[type[BaseModel], None] = {}

    def walk(kind: type[BaseModel]) -> None:
        if kind in found:
            return
        found[kind] = None
        for field in kind.model_fields.values():
            for inner in _inner(field.annotation):
                walk(inner)

    walk(RunRecord)
    rooms = [kind for kind in found if kind.__module__ == RunRecord.__module__]
    head = (
        "# The record\n\nWhat `record.json` of a run holds. `bench/record.schema.json` is the same as a JSON schema. "
        "`spec` is what [the config](config.md) decodes to; unknown is `null`."
    )
    return "\n\n".join([head, *(_value(kind) for kind in rooms)])


def _value(kind: type[BaseModel]) -> str:
    own = keys(kind, flat=True)
    return f"## {kind.__name__}\n\n{_doc(kind)}" + (f"\n\n{_table(own)}" if own else "")


def _doc(kind: type[BaseModel]) -> str:
    return plain(" ".join(inspect.cleandoc(kind.__doc__ or "").split()))


def _inner(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield every class of values that an annotation names, however deep."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _inner(argument)


# ---------------------------------------- keys of a class


def keys(
    kind: type[BaseModel],
    prefix: str = "",
    *,
    skip: Collection[str] = (),
    said: Mapping[str, str] | None = None,
    flat: bool = False,
) -> list[ConfigKey]:
    """Return the keys of a class of values, those of values in it after a dot; `said` are meanings that come first."""
    schema, notes = kind.model_json_schema(by_alias=True), comments.notes(kind)
    found = []
    for name, field in kind.model_fields.items():
        if name in skip or "properties" not in schema:  # a value without names, such as tokens by kind
            continue
        written = field.alias or name
        path = f"{prefix}.{written}" if prefix else written
        inner = [one for one in list_models(field.annotation) if one.__module__.startswith("bench.")]
        meaning = (said or {}).get(path.removeprefix("machine.")) or notes.get(name, "")
        if inner and not flat and _single(field):
            below = keys(inner[0], path, said=said)
            optional = [ConfigKey(path, "section or null", "null", meaning)] if field.default is None else []
            found += [*optional, *below]
            continue
        type_text = _type(schema["properties"][written], schema.get("$defs", {}))
        found.append(ConfigKey(path, type_text, _default(field), meaning))
    return found


def _single(field: FieldInfo) -> bool:
    """Whether a field holds one value of a class and not a series of them."""
    annotation = field.annotation
    return isinstance(annotation, type) or type(None) in getattr(annotation, "__args__", ())


def _table(found: list[ConfigKey]) -> str:
    rows = [(code(key.path), plain(key.type), code(key.default), plain(key.meaning)) for key in found]
    return table(("key", "type", "default", "meaning"), rows)


def _default(field: FieldInfo) -> str:
    return "" if field.is_required() else _shown(field.get_default(call_default_factory=True))


def _shown(value: Any) -> str:
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


def _type(schema: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """Return a JSON schema in words."""
    if "$ref" in schema:
        name = str(schema["$ref"]).rpartition("/")[2]
        return name if "properties" in known.get(name, {}) else _type(known[name], known)
    if "allOf" in schema:
        return _type(schema["allOf"][0], known)
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(one, known) for one in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{one}`" for one in schema.get("enum", [schema.get("const")]))
    kind = schema.get("type")
    if kind == "array":
        items = schema.get("items") or {}
        return (
            f"list of {_type(items, known)}" if items else f"list of {len(schema.get('prefixItems', [])) or 'values'}"
        )
    if kind == "object":
        inner = schema.get("additionalProperties")
        return f"mapping to {_type(inner, known)}" if isinstance(inner, Mapping) and inner else "mapping"
    return f"{_WORDS.get(str(kind), 'anything')}{_bounds(schema)}"


def _bounds(schema: Mapping[str, Any]) -> str:
    signs = {"exclusiveMinimum": ">", "minimum": "≥", "exclusiveMaximum": "<", "maximum": "≤"}
    bounds = [f"{sign} {_shown(schema[name])}" for name, sign in signs.items() if name in schema]
    return f" {', '.join(bounds)}" if bounds else ""
