"""Every key that a run, a sweep, a study, a machine or a site can be given, and the files of conf/ by name."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel

from bench import data, engines, launchers, models, plugins
from bench.machine import Machine
from bench.presets import find_conf_folder
from bench.record import Limits
from bench.reference.comments import read_key_comments
from bench.reference.keys import ConfigKey, format_value, list_keys
from bench.spec import DataSpec, EngineSpec, ModelSpec, RunSpec
from bench.study import Study

GROUPS = ("model", "engine", "objective", "data", "measure", "machine", "launcher", "study")
"""The folders of conf/."""


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
