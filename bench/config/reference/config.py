"""List every config key of a run, study, machine or site, and the names of the files in conf/."""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_origin

import yaml
from pydantic import BaseModel

from bench.config.decode import PLUGIN_GROUPS, PluginGroup
from bench.core import plugins
from bench.core.field_errors import describe_type, format_value, list_models
from bench.core.files import find_conf_folder
from bench.core.machine import Machine
from bench.core.spec import AdapterSpec, RunSpec
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
    for name in plugins.list_names(plugins.LAUNCHER):
        said = read_plugin_comments("launcher", name)
        options = load_options(PLUGIN_GROUPS["launcher"], name)
        yield KeySection("launcher", name, tuple(list_keys(options, "launcher", said=said)))
    yield KeySection("study", "", tuple(list_keys(Study)))


def list_group_files(group: str) -> list[str]:
    """Return the sorted names of the shipped files in a folder of conf/."""
    return sorted(path.stem for path in (find_conf_folder() / group).glob("*.yaml"))


def load_options(group: PluginGroup, name: str) -> type[BaseModel]:
    """Return the pydantic class of a plug-in's own keys. Raise UserError for a plug-in that cannot be used."""
    options: type[BaseModel] = getattr(group.package.load(name), group.part)
    return options


def read_plugin_comments(group: str, name: str) -> dict[str, str]:
    """Return the meanings of those keys of a plug-in that comments in files of conf/ document, by dotted key. All other
    keys are documented in the fields of their classes."""
    folder = find_conf_folder() / group
    # Data sources share keys with different meanings, so the comments in a source's own file take precedence.
    files = [folder / f"{name}.yaml", *(sorted(folder.glob("*.yaml")) if group == "data" else ())]
    said = read_key_comments(*filter(Path.is_file, files)) if group in ("data", "launcher") else {}
    said.pop(f"{group}.name", None)  # the comment above `name` describes the whole file
    return said


def _take_default(plain: Any, key: ConfigKey) -> ConfigKey:
    """Return `key` with its default replaced by the value in conf/config.yaml, whose content is `plain`. Without such a
    value, return it unchanged."""
    value = plain
    for part in key.path.split("."):
        value = value.get(part, key) if isinstance(value, Mapping) else key
    return key if value is key or value == {} else key._replace(default=format_value(value))


def _list_group(name: str, group: PluginGroup) -> Iterator[KeySection]:
    """Yield the keys that all files of a config group share, and then the keys of every plug-in that its files may
    name."""
    assert group.spec is not None
    said = read_plugin_comments(name, "")
    presets = {file: yaml.safe_load((find_conf_folder() / name / f"{file}.yaml").read_text(encoding="utf-8"))
               for file in list_group_files(name)} if name == "engine" else {}  # fmt: skip
    yield KeySection(name, "", tuple(list_keys(group.spec, name, skip={group.holder}, said=said)))
    for plugin in plugins.list_names(group.kind):
        found = list_keys(load_options(group, plugin), group.prefix, said=read_plugin_comments(name, plugin))
        chosen = {file: plain for file, plain in presets.items() if plain.get(group.names) == plugin}
        yield KeySection(name, plugin, tuple(_add_presets(key, chosen) for key in found))


def _add_presets(key: ConfigKey, presets: Mapping[str, Mapping[str, Any]]) -> ConfigKey:
    """Return an engine's key. Its meaning ends in brackets with the key's values in the engine files of conf/. Values
    equal to the default are omitted."""
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

    Fields named in `skip` are omitted. Meanings in `said`, by dotted key, take precedence over field descriptions.
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
