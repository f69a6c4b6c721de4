"""Every key that a run, a sweep, a study, a machine or a site can be given, and the files of conf/ by name."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from bench import data, engines, launchers, models
from bench.config.decode import list_models
from bench.core import plugins
from bench.core.files import find_conf_folder
from bench.core.machine import Machine
from bench.core.record import Limits
from bench.core.spec import DataSpec, EngineSpec, ModelSpec, RunSpec
from bench.core.study import Study

GROUPS = ("model", "engine", "objective", "data", "measure", "machine", "launcher", "study")
"""The folders of conf/."""


class ConfigKey(NamedTuple):
    """One key of a value."""

    path: str  # dotted
    type: str  # in words
    default: str  # as YAML has it; empty: it has to be given
    meaning: str


class PluginGroup(NamedTuple):
    """A group whose files name a plug-in, which has keys of its own besides the group's."""

    spec: type[BaseModel] | None  # the keys that every file of the group has
    names: str  # the key that names the plug-in
    holder: str  # the key of `spec` that holds the plug-in's keys
    part: str  # the plug-in's own class
    kind: Any
    package: Any
    prefix: str  # of the plug-in's keys on the command line


PLUGIN_GROUPS = {
    "model": PluginGroup(ModelSpec, "family", "shape", "Shape", plugins.FAMILY, models, "model.shape"),
    "engine": PluginGroup(EngineSpec, "backend", "options", "Options", plugins.ENGINE, engines, "engine"),
    "data": PluginGroup(DataSpec, "source", "options", "Options", plugins.DATA, data, "data"),
    "launcher": PluginGroup(None, "name", "", "Options", plugins.LAUNCHER, launchers, "launcher"),
}


class KeySection(NamedTuple):
    """Keys that belong together."""

    group: str  # a folder of conf/; empty: of the run itself
    plugin: str  # whose keys these are; empty: every file of the group may have them
    keys: tuple[ConfigKey, ...]


def list_sections() -> Iterator[KeySection]:
    """Yield the keys of the run, of each group and plug-in, and of a study."""
    yield KeySection("", "", tuple(_list_run_keys()))
    for group in ("model", "engine", "data"):
        yield from _list_group(group, PLUGIN_GROUPS[group])
    yield KeySection("machine", "", tuple(list_keys(Machine, "machine")))
    for name in plugins.list_names(plugins.LAUNCHER):
        yield KeySection("launcher", name, tuple(_list_launcher_keys(name)))
    yield KeySection("study", "", tuple(list_keys(Study)))


def list_group_files(group: str) -> list[str]:
    """Return the names of the files that ship in a folder of conf/, sorted."""
    return sorted(path.stem for path in (find_conf_folder() / group).glob("*.yaml"))


def load_options(group: PluginGroup, name: str) -> type[BaseModel]:
    """Return the class of a plug-in's own keys; UserError for one that cannot be used."""
    options: type[BaseModel] = getattr(group.package.load(name), group.part)
    return options


def read_plugin_comments(group: str, name: str) -> dict[str, str]:
    """Return the meanings of keys that stand in files of conf/ and not beside the fields of a class."""
    folder = find_conf_folder() / group
    files = sorted(folder.glob("*.yaml")) if group == "data" else [folder / f"{name}.yaml"]
    said = read_key_comments(*files) if group in ("data", "launcher") and files[0].is_file() else {}
    return {key: note for key, note in said.items() if key != f"{group}.name"}  # what stands above is of the file


def _list_run_keys() -> Iterator[ConfigKey]:
    file = find_conf_folder() / "config.yaml"
    plain = yaml.safe_load(file.read_text(encoding="utf-8"))
    groups = {"model", "engine", "data", "objective"}
    for key in list_keys(RunSpec, skip=groups, said=read_key_comments(file)):
        yield _take_default(plain, key)


def _take_default(plain: Any, key: ConfigKey) -> ConfigKey:
    """Return a key with the default that a file gives it."""
    value = plain
    for part in key.path.split("."):
        value = value.get(part, key) if isinstance(value, Mapping) else key
    return key if value is key or value == {} else key._replace(default=format_value(value))


def _list_group(name: str, group: PluginGroup) -> Iterator[KeySection]:
    """Yield a group's own keys, and those of every plug-in that it may name."""
    assert group.spec is not None
    said, presets = read_plugin_comments(name, ""), _read_presets(name) if name == "engine" else {}
    yield KeySection(name, "", tuple(list_keys(group.spec, name, skip={group.holder}, said=said)))
    for plugin in plugins.list_names(group.kind):
        found = list_keys(load_options(group, plugin), group.prefix, said=said)
        yield KeySection(name, plugin, tuple(_add_presets(key, group.names, plugin, presets) for key in found))


def _list_launcher_keys(name: str) -> Iterator[ConfigKey]:
    options: type[Limits] = launchers.load(name).Options
    yield from list_keys(options, "launcher", said=read_plugin_comments("launcher", name))


def _read_presets(group: str) -> dict[str, dict[str, Any]]:
    """Return what stands in the files that ship in a folder of conf/, by their names."""
    folder = find_conf_folder() / group
    return {
        name: yaml.safe_load((folder / f"{name}.yaml").read_text(encoding="utf-8")) for name in list_group_files(group)
    }


def _add_presets(key: ConfigKey, names: str, plugin: str, presets: Mapping[str, Mapping[str, Any]]) -> ConfigKey:
    """Return a key of an engine with what the files that ship say instead of its default, in brackets."""
    said: dict[str, list[str]] = {}
    for file, plain in presets.items():
        value: Any = plain if plain.get(names) == plugin else {}
        for part in key.path.split(".")[1:]:
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None and format_value(value) != key.default:
            said.setdefault(format_value(value), []).append(file)
    files = "; ".join(f"{', '.join(found)}: {value}" for value, found in said.items())
    return key._replace(meaning=f"{key.meaning} ({files})".strip()) if files else key


# ---------------------------------------- keys of a class, and of a file


def list_keys(
    kind: type[BaseModel],
    prefix: str = "",
    *,
    skip: Collection[str] = (),
    said: Mapping[str, str] | None = None,
    flat: bool = False,
) -> list[ConfigKey]:
    """Return the keys of a class of values, those of values in it after a dot; `said` are meanings that come first."""
    schema = kind.model_json_schema(by_alias=True)
    found = []
    for name, field in kind.model_fields.items():
        if name in skip or "properties" not in schema:  # a value without names, such as tokens by kind
            continue
        written = field.alias or name
        path = f"{prefix}.{written}" if prefix else written
        inner = [one for one in list_models(field.annotation) if one.__module__.startswith("bench.")]
        meaning = (said or {}).get(path.removeprefix("machine.")) or field.description or ""
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


def read_key_comments(*files: Path) -> dict[str, str]:
    """Return the comments beside the keys of YAML files, by dotted key below the folder's name."""
    found: dict[str, str] = {}
    for file in files:
        within: list[tuple[int, str]] = [] if file.parent.name == "conf" else [(-1, file.parent.name)]
        above: list[str] = []
        for line in file.read_text(encoding="utf-8").splitlines():
            match = re.match(r"( *)([A-Za-z_]\w*):(?: .*?)??(?:  +# (.*))?$", line)
            if match:
                within = [one for one in within if one[0] < len(match[1])] + [(len(match[1]), match[2])]
                if note := match[3] or " ".join(above):
                    found.setdefault(".".join(name for _, name in within), note)
            above = [*above, line.strip("# ")] if line.startswith("#") else []
    return found
