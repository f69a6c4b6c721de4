"""JSON schemas of the files that a user writes, by which an editor completes, explains and checks them.

They are made from the classes that decode those files, with every reference written out, and from the comments in the
files that ship. Keys of installed plug-ins are in them.
"""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from bench.config.reference.config import (
    GROUPS,
    PLUGIN_GROUPS,
    PluginGroup,
    list_group_files,
    load_options,
    read_key_comments,
    read_plugin_comments,
)
from bench.core import plugins
from bench.core.files import find_conf_folder
from bench.core.machine import Machine
from bench.core.spec import MeasureSpec, RunSpec
from bench.core.study import Study

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_DEFAULTS = {
    "type": "array",
    "description": "files of the same folder that this one begins with, as in [slurm, _self_]",
}
_TABLES = ("matmul", "collectives")  # of a calibration: may be tables of words too


def build_schemas() -> dict[str, Schema]:
    """Return the schema of a study file and of each other group's files, by the name of the folder in conf/."""
    built: dict[str, Schema] = {
        "machine": _inline(Machine), "measure": _inline(MeasureSpec), "objective": {"properties": {"name": _TEXT}},
    }  # fmt: skip
    for name, group in PLUGIN_GROUPS.items():
        built[name] = _build_plugin_group(name, group)
    for table in _TABLES:
        calibration = built["machine"]["properties"]["calibration"]["anyOf"][0]["properties"]
        calibration[table] = {"anyOf": [calibration[table], _TEXT]}
    keys = _list_override_keys(built)
    built = {name: _finish(name, schema) for name, schema in built.items()}
    return {name: built[name] for name in GROUPS if name != "study"} | {"study": _build_study(keys)}


def to_json(schema: Schema) -> str:
    """Return a schema as the text of a file."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


_TEXT: Schema = {"type": "string"}


def _finish(name: str, schema: Schema) -> Schema:
    """Return the schema of a group's file: any of its keys, none of them required, for a file may begin with others."""
    properties = {**schema["properties"], "defaults": _DEFAULTS}
    return _build_object(properties, f"a file of conf/{name}") | {"$schema": DIALECT}


def _build_object(properties: Schema, description: str, patterns: Schema | None = None) -> Schema:
    schema = {"type": "object", "description": description, "properties": properties, "additionalProperties": False}
    return schema | ({"patternProperties": patterns} if patterns else {})


# ---------------------------------------- classes


def _inline(kind: type[BaseModel]) -> Schema:
    """Return the schema of a class with references written out."""
    schema = kind.model_json_schema(by_alias=True)
    inlined: Schema = _resolve(schema, schema.pop("$defs", {}))
    return inlined


def _resolve(node: Any, definitions: Schema) -> Any:
    """Return a part of a schema without references, titles and required keys."""
    if isinstance(node, list):
        return [_resolve(one, definitions) for one in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        beside = {key: value for key, value in node.items() if key != "$ref"}
        inlined: Schema = _resolve(definitions[node["$ref"].rpartition("/")[2]], definitions)
        return inlined | beside
    found = {
        key: value if key in ("default", "const", "enum") else _resolve(value, definitions)
        for key, value in node.items()
        if key not in ("title", "properties", "required")
    }
    if "properties" in node:
        found["properties"] = {name: _resolve(part, definitions) for name, part in node["properties"].items()}
    return found


def _describe(schema: Schema, meaning: str) -> Schema:
    return {**schema, "description": meaning} if meaning else schema


# ---------------------------------------- groups with plug-ins


def _build_plugin_group(name: str, group: PluginGroup) -> Schema:
    """Return the keys of a group's files: its own, and those of all its plug-ins."""
    properties = _inline(group.spec)["properties"] if group.spec else {}
    properties |= {group.names: {"enum": [*plugins.list_names(group.kind), None]}}
    inner: Schema = {}
    for plugin in plugins.list_names(group.kind):
        said = read_plugin_comments(name, plugin)
        found = _inline(load_options(group, plugin))["properties"]
        for key, part in found.items():
            meaning = said.get(f"{name}.{key}", part.get("description", ""))
            inner[key] = _unite(inner.get(key), _describe(part, meaning))
    if group.holder == "shape":
        described = properties["shape"].get("description", "")
        properties |= {"shape": _build_object(inner, described), "config_file": _describe(_TEXT, _CONFIG_FILE)}
    else:
        properties.pop(group.holder, None)
        properties |= inner
    return {"properties": properties}


_CONFIG_FILE = "a Hugging Face config.json, instead of shape"


def _unite(one: Schema | None, other: Schema) -> Schema:
    """Return what a key may be of which two plug-ins have different ideas."""
    if one is None or one == other:
        return other
    return {"anyOf": [one, other], "description": one.get("description") or other.get("description", "")}


# ---------------------------------------- a study


def _build_study(keys: Mapping[str, Schema]) -> Schema:
    """Return the schema of a study: its overrides are keys of a run, its axes lists of their values. An axis of another
    name has mappings for values."""
    below: Schema = {f"^{key}\\.": {} for key, part in keys.items() if _is_mapping(part)}
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
        study[name] = _describe(mapping, study[name].get("description") or "what every point shares")
    definitions = {"overrides": overrides, **keys}
    return {"$schema": DIALECT, **_build_object({**study, "axes": axes}, "a file of conf/study"), "$defs": definitions}


_AXES = "what varies: a key, or a word for values that are mappings of several keys; every combination is a point"


def _build_list(items: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": items}


def _is_mapping(schema: Schema) -> bool:
    """Whether a key takes words that it does not know itself, as `sequence` does."""
    parts = (schema, *schema.get("anyOf", ()))
    return any(part.get("type") == "object" and "properties" not in part for part in parts)


def _list_override_keys(groups: Mapping[str, Schema]) -> dict[str, Schema]:
    """Return every key of a run, dotted, and the groups, which take the name of a file."""
    file = find_conf_folder() / "config.yaml"
    keys = _flatten(_inline(RunSpec), "", read_key_comments(file))
    for name, schema in groups.items():
        keys |= _flatten(schema, name, {}) if name != "objective" else {}
        keys[name] = {"anyOf": [{"enum": list_group_files(name)}, _TEXT], "description": f"a file of conf/{name}"}
    return keys


def _flatten(schema: Schema, prefix: str, said: Mapping[str, str]) -> dict[str, Schema]:
    """Return the keys of an object by dotted name, with those of the objects in it."""
    found: dict[str, Schema] = {}
    for name, part in schema.get("properties", {}).items():
        path = f"{prefix}.{name}" if prefix else name
        found[path] = _describe(part, said.get(path, ""))
        for inner in (part, *part.get("anyOf", ())):
            found |= _flatten(inner, path, said)
    return found
