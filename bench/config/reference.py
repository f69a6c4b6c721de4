"""Reference of every config key of a run, study, machine or site, for the reference pages, `zeroscale explain`,
completion and editors.

Each key has a type, a default and a meaning. The module also builds JSON schemas of the YAML files that a user writes.
An editor uses the schemas to complete, explain and check the files. The schemas are generated from the classes that
decode these files, and from comments in the shipped files. Each `$ref` entry is replaced by its definition. Keys of
installed plug-ins are included.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_origin

import yaml
from pydantic import BaseModel

from bench.config.decode import PLUGIN_GROUPS, PluginGroup
from bench.core import plugins
from bench.core.field_errors import describe_type, format_value, list_models
from bench.core.files import find_conf_folder, find_group_files
from bench.core.machine import Machine
from bench.core.spec import AdapterSpec, MeasureSpec, RunSpec
from bench.core.study import Study

GROUPS = ("model", "adapter", "engine", "objective", "data", "measure", "machine", "launcher", "study")
"""Folders of conf/, which are the config groups."""


class ConfigKey(NamedTuple):
    """A config key with its type, default and meaning."""

    path: str  # dotted
    type: str  # in words
    default: str  # as written in YAML; empty if the key is required
    meaning: str


class KeySection(NamedTuple):
    """Config keys of one config group (a folder of conf/) or of one plug-in."""

    group: str  # a folder of conf/; empty for keys of the run itself
    plugin: str  # the plug-in with these keys; empty if every file of the group may have them
    keys: tuple[ConfigKey, ...]


def list_sections() -> Iterator[KeySection]:
    """Yield the config keys of the run itself, of each group and plug-in, and of a study."""
    file = find_conf_folder() / "config.yaml"
    plain = yaml.safe_load(file.read_text(encoding="utf-8"))
    run_keys = list_keys(
        RunSpec, skip={"model", "adapter", "engine", "data", "objective"}, said=read_key_comments(file)
    )
    yield KeySection("", "", tuple(_take_default(plain, key) for key in run_keys))
    for name in ("model", "engine", "data"):
        yield from _list_group(name, PLUGIN_GROUPS[name])
    yield KeySection("adapter", "", tuple(list_keys(AdapterSpec, "adapter")))
    yield KeySection("machine", "", tuple(list_keys(Machine, "machine")))
    for name, launcher in plugins.load_all(plugins.LAUNCHER):
        said = read_plugin_comments("launcher", name)
        yield KeySection("launcher", name, tuple(list_keys(launcher.Options, "launcher", said=said)))
    yield KeySection("study", "", tuple(list_keys(Study)))


def read_plugin_comments(group: str, name: str) -> dict[str, str]:
    """Return the meanings of a plug-in's config keys, by dotted key, from the comments in YAML files of conf/. `group`
    is the config group (a folder of conf/), and `name` is the name of the plug-in. If `name` is empty, the comments on
    keys that all files of the group share are read. Only data sources and launchers have such comments. The keys of
    other groups are documented in the fields of their classes."""
    folder = find_conf_folder() / group
    # Data sources share keys with different meanings, so the comments in a source's own file take precedence.
    files = [folder / f"{name}.yaml", *(sorted(folder.glob("*.yaml")) if group == "data" else ())]
    said = read_key_comments(*filter(Path.is_file, files)) if group in ("data", "launcher") else {}
    said.pop(f"{group}.name", None)  # the comment above `name` describes the whole file
    return said


def _take_default(plain: Any, key: ConfigKey) -> ConfigKey:
    """Return `key` with its default replaced by the value in conf/config.yaml, whose content is `plain`. Without such a
    value, return `key` unchanged."""
    value = plain
    for part in key.path.split("."):
        value = value.get(part, key) if isinstance(value, Mapping) else key
    return key if value is key or value == {} else key._replace(default=format_value(value))


def _list_group(name: str, group: PluginGroup) -> Iterator[KeySection]:
    """Yield the keys that all files of a config group share, and then the keys of every plug-in that a file of the
    group may name."""
    assert group.spec is not None
    said = read_plugin_comments(name, "")
    files = find_group_files(name) if name == "engine" else {}
    presets = {file: yaml.safe_load(path.read_text(encoding="utf-8")) for file, path in files.items()}
    yield KeySection(name, "", tuple(list_keys(group.spec, name, skip={group.holder}, said=said)))
    for plugin, module in plugins.load_all(group.kind):
        found = list_keys(getattr(module, group.part), group.prefix, said=read_plugin_comments(name, plugin))
        chosen = {file: plain for file, plain in presets.items() if plain.get(group.names) == plugin}
        yield KeySection(name, plugin, tuple(_add_presets(key, chosen) for key in found))


def _add_presets(key: ConfigKey, presets: Mapping[str, Mapping[str, Any]]) -> ConfigKey:
    """Return an engine's config key with an extended description in the field `meaning`. The engine files of conf/
    (presets) set values for this key. These values are added in brackets. Values equal to the default are omitted."""
    said: dict[str, list[str]] = {}
    for file, plain in presets.items():
        value: Any = plain
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
    """Return the keys of a class. Keys of nested classes follow with dotted names, unless `flat` is True.

    Fields named in `skip` are omitted. `said` maps dotted keys to meanings. A meaning in `said` replaces the
    description of the field.
    """
    schema = kind.model_json_schema(by_alias=True)
    found = []
    for name, field in kind.model_fields.items():
        if name in skip or "properties" not in schema:  # a mapping with free keys, such as tokens by kind
            continue
        written = field.alias or name
        path = f"{prefix}.{written}" if prefix else written
        inner = [] if flat else [one for one in list_models(field.annotation) if one.__module__.startswith("bench.")]
        meaning = (said or {}).get(path.removeprefix("machine.")) or field.description or ""
        # Only a field with a single model, or null, has nested keys; a list or dict of models has none.
        if inner and (inner[0] is field.annotation or type(None) in getattr(field.annotation, "__args__", ())):
            found += [ConfigKey(path, "section or null", "null", meaning)] if field.default is None else []
            found += list_keys(inner[0], path, said=said)
            continue
        is_mapping = inner and get_origin(field.annotation) is dict
        words = describe_type(schema["properties"][written], schema.get("$defs", {}))
        default = "" if field.is_required() else format_value(field.get_default(call_default_factory=True))
        found.append(ConfigKey(path, "sections by name" if is_mapping else words, default, meaning))
    return found


def read_key_comments(*files: Path) -> dict[str, str]:
    """Return the comments next to or above the keys of YAML files. Each dotted key begins with the name of the file's
    folder, such as `launcher`, except in conf/config.yaml."""
    found: dict[str, str] = {}
    for file in files:
        within: list[tuple[int, str]] = [] if file.parent.name == "conf" else [(-1, file.parent.name)]
        above: list[str] = []
        for line in file.read_text(encoding="utf-8").splitlines():
            # `key: value  # comment`, at any depth; two spaces before # as ruff and YAML style have them
            match = re.match(r"( *)([A-Za-z_]\w*):(?: .*?)??(?:  +# (.*))?$", line)
            if match:
                within = [one for one in within if one[0] < len(match[1])] + [(len(match[1]), match[2])]
                if note := match[3] or " ".join(above):
                    found.setdefault(".".join(name for _, name in within), note)
            above = [*above, line.strip("# ")] if line.startswith("#") else []
    return found


# ---------------------------------------- JSON schemas

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_DEFAULTS = {
    "type": "array",
    "description": "files of the same folder whose keys this file inherits, as in [slurm, _self_]",
}


def build_schemas() -> dict[str, Schema]:
    """Return the JSON schemas of study files and of the files of every other config group. Keys are the names of their
    folders in conf/."""
    built: dict[str, Schema] = {
        "machine": _inline(Machine), "adapter": _inline(AdapterSpec), "measure": _inline(MeasureSpec),
        "objective": {"properties": {"name": _TEXT}},
    }  # fmt: skip
    for name, group in PLUGIN_GROUPS.items():
        built[name] = _build_plugin_group(name, group)
    calibration = built["machine"]["properties"]["calibration"]["anyOf"][0]["properties"]
    # A calibrated file may have these tables as text, which is far shorter than lists.
    for table in ("matmul", "collectives"):
        calibration[table] = {"anyOf": [calibration[table], _TEXT]}
    keys = _list_override_keys(built)
    finished = {
        # No key is required, because a file may take its keys from other files in `defaults`.
        name: _build_object({**built[name]["properties"], "defaults": _DEFAULTS}, f"a file of conf/{name}")
        | {"$schema": DIALECT}
        for name in GROUPS
        if name != "study"
    }
    return finished | {"study": _build_study(keys)}


_TEXT: Schema = {"type": "string"}
_NULLABLE: Schema = {"type": ["string", "null"]}


def _build_object(properties: Schema, description: str, patterns: Schema | None = None) -> Schema:
    schema = {"type": "object", "description": description, "properties": properties, "additionalProperties": False}
    return schema | ({"patternProperties": patterns} if patterns else {})


def _inline(kind: type[BaseModel]) -> Schema:
    """Return the JSON schema of a class with its references resolved."""
    schema = kind.model_json_schema(by_alias=True)
    inlined: Schema = _resolve(schema, schema.pop("$defs", {}))
    return inlined


def _resolve(node: Any, definitions: Schema) -> Any:
    """Return a JSON schema, or a part of one, with references resolved. Titles and lists of required keys are
    removed."""
    if isinstance(node, list):
        return [_resolve(one, definitions) for one in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        beside = {key: value for key, value in node.items() if key != "$ref"}
        inlined: Schema = _resolve(definitions[node["$ref"].rpartition("/")[2]], definitions)
        return inlined | beside
    found = {
        # These entries hold literal values, in which a key `$ref` or `title` has no meaning for the schema.
        key: value if key in ("default", "const", "enum") else _resolve(value, definitions)
        for key, value in node.items()
        if key not in ("title", "properties", "required")
    }
    if "properties" in node:
        found["properties"] = {name: _resolve(part, definitions) for name, part in node["properties"].items()}
    return found


def _describe(schema: Schema, meaning: str) -> Schema:
    return {**schema, "description": meaning} if meaning else schema


def _build_plugin_group(name: str, group: PluginGroup) -> Schema:
    """Return the JSON schema of a group's files, with the keys of the group and of all its plug-ins."""
    properties = _inline(group.spec)["properties"] if group.spec else {}
    properties |= {group.names: {"enum": [*plugins.list_names(group.kind), None]}}
    inner: Schema = {}
    for plugin, module in plugins.load_all(group.kind):
        said = read_plugin_comments(name, plugin)
        found = _inline(getattr(module, group.part))["properties"]
        for key, part in found.items():
            meaning = said.get(f"{name}.{key}", part.get("description", ""))
            inner[key] = _unite(inner.get(key), _describe(part, meaning))
    if group.holder == "shape":
        described = properties["shape"].get("description", "")
        properties |= {"shape": _build_object(inner, described), "config_file": _describe(_NULLABLE, _CONFIG_FILE)}
    else:
        properties.pop(group.holder, None)
        properties |= inner
    return {"properties": properties}


_CONFIG_FILE = "path of a Hugging Face config.json, in place of shape; null: config.json of model.checkpoint"


def _unite(one: Schema | None, other: Schema) -> Schema:
    """Return the JSON schema of a key that two plug-ins have; it accepts the values of both plug-ins. `one` is None if
    no earlier plug-in has the key."""
    if one is None or one == other:
        return other
    return {"anyOf": [one, other], "description": one.get("description") or other.get("description", "")}


def _build_study(keys: Mapping[str, Schema]) -> Schema:
    """Return the JSON schema of a study file.

    `base` maps keys of a run to values, and `axes` maps keys of a run to lists of values. An axis with any other name
    is a list of mappings, each of which sets several keys.
    """
    # Keys whose sub-keys are not in the schema, such as `sequence.encoder`.
    below: Schema = {
        f"^{key}\\.": {}
        for key, schema in keys.items()
        for part in (schema, *schema.get("anyOf", ()))
        if part.get("type") == "object" and "properties" not in part
    }
    referred = {key: {"$ref": f"#/$defs/{key}"} for key in keys}
    overrides = _build_object(referred, "keys of a run and their values", below)
    mapping = {"$ref": "#/$defs/overrides"}
    axes = {
        **_build_object({key: _build_list({"anyOf": [one, mapping]}) for key, one in referred.items()}, _AXES),
        "patternProperties": {pattern: _build_list({}) for pattern in below},
        "additionalProperties": _build_list(mapping),
    }
    study = _inline(Study)["properties"]
    for name in ("base", "control"):
        study[name] = _describe(mapping, study[name].get("description") or "keys that every point shares")
    definitions = {"overrides": overrides, **keys}
    return {"$schema": DIALECT, **_build_object({**study, "axes": axes}, "a file of conf/study"), "$defs": definitions}


_AXES = (
    "lists of values by key; a list of mappings, which set several keys, may have any name. All combinations are points"
)


def _build_list(items: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": items}


def _list_override_keys(groups: Mapping[str, Schema]) -> dict[str, Schema]:
    """Return the schema of every dotted key of a run. A group name is also a key, whose value is the name of a file."""
    file = find_conf_folder() / "config.yaml"
    keys = _flatten(_inline(RunSpec), "", read_key_comments(file))
    for name, schema in groups.items():
        keys |= _flatten(schema, name, {}) if name != "objective" else {}
        keys[name] = {"anyOf": [{"enum": list(find_group_files(name))}, _TEXT], "description": f"a file of conf/{name}"}
    return keys


def _flatten(schema: Schema, prefix: str, said: Mapping[str, str]) -> dict[str, Schema]:
    """Return the JSON schemas of an object's keys, and of the keys of objects within it, by dotted key. `prefix` is the
    dotted key of the object. `said` holds descriptions by dotted key, which are added to the schemas."""
    found: dict[str, Schema] = {}
    for name, part in schema.get("properties", {}).items():
        path = f"{prefix}.{name}" if prefix else name
        found[path] = _describe(part, said.get(path, ""))
        for inner in (part, *part.get("anyOf", ())):
            found |= _flatten(inner, path, said)
    return found
