"""JSON schemas of the YAML files that a user writes. With them an editor completes, explains and checks the files.

The schemas are generated from the classes that decode these files, and from comments in the shipped files. References
are resolved, and keys of installed plug-ins are included.
"""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from bench.config.decode import PLUGIN_GROUPS, PluginGroup
from bench.config.reference.config import (
    GROUPS,
    list_group_files,
    load_options,
    read_key_comments,
    read_plugin_comments,
)
from bench.core import plugins
from bench.core.files import find_conf_folder
from bench.core.machine import Machine
from bench.core.spec import AdapterSpec, MeasureSpec, RunSpec
from bench.core.study import Study

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
_DEFAULTS = {
    "type": "array",
    "description": "files of the same folder whose keys this file starts from, as in [slurm, _self_]",
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


def to_json(schema: Schema) -> str:
    """Return a JSON schema as text."""
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


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
    for plugin in plugins.list_names(group.kind):
        said = read_plugin_comments(name, plugin)
        found = _inline(load_options(group, plugin))["properties"]
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


_CONFIG_FILE = "a Hugging Face config.json, instead of shape; null: that of checkpoint"


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


_AXES = "lists of values by key, or by any name for values that are mappings of keys; every combination is a point"


def _build_list(items: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": items}


def _list_override_keys(groups: Mapping[str, Schema]) -> dict[str, Schema]:
    """Return the schema of every dotted key of a run. A group name is also a key, whose value is the name of a file."""
    file = find_conf_folder() / "config.yaml"
    keys = _flatten(_inline(RunSpec), "", read_key_comments(file))
    for name, schema in groups.items():
        keys |= _flatten(schema, name, {}) if name != "objective" else {}
        keys[name] = {"anyOf": [{"enum": list_group_files(name)}, _TEXT], "description": f"a file of conf/{name}"}
    return keys


def _flatten(schema: Schema, prefix: str, said: Mapping[str, str]) -> dict[str, Schema]:
    """Return the schemas of an object's keys, and of the keys of objects within it, by dotted key. `said` has the
    meanings of keys."""
    found: dict[str, Schema] = {}
    for name, part in schema.get("properties", {}).items():
        path = f"{prefix}.{name}" if prefix else name
        found[path] = _describe(part, said.get(path, ""))
        for inner in (part, *part.get("anyOf", ())):
            found |= _flatten(inner, path, said)
    return found
