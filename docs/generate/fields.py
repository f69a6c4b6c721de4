"""Reference pages of config keys and record fields: type, default and meaning, from the classes and from comments in
conf/."""

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic import BaseModel

from bench.config.decode import PLUGIN_GROUPS
from bench.config.reference import (
    GROUPS,
    ConfigKey,
    KeySection,
    list_keys,
    list_sections,
)
from bench.core.files import find_group_files
from bench.core.machine import Machine
from bench.core.record import RunRecord
from bench.core.spec import DataSpec, EngineSpec, ModelSpec
from bench.core.study import Study
from docs.generate.markdown import code, plain, table

# ---------------------------------------- the page of the config

_HEAD = (
    "# Config keys\n\n"
    "Set a key as `KEY=VALUE` on the command line, or in a file of your own folder: `--config-dir`. *Default* is the "
    "value if neither the command line nor a group's file sets the key; the values in the shipped files are in "
    "brackets. A number in a type is a bound."
)
_CLASSES: dict[str, type[BaseModel]] = {"model": ModelSpec, "engine": EngineSpec, "data": DataSpec, "machine": Machine}


def config_page() -> str:
    """Return the page of all config keys of runs, sweeps and studies."""
    sections: dict[str, list[KeySection]] = {}
    for section in list_sections():
        sections.setdefault(section.group, []).append(section)
    (run,), (study,) = sections.pop(""), sections.pop("study")
    parts = [_HEAD, "## The run\n\n`conf/config.yaml`\n\n" + _table(run.keys)]
    for group in GROUPS:
        if group == "objective":
            parts.append(f"## `objective`\n\nOne of {_files(group)}. Its lengths are `sequence.KIND`.")
        elif group in sections:
            said = f"\n\n{_doc(_CLASSES[group])}" if group in _CLASSES else ""
            parts.append(f"## `{group}`\n\nFiles that ship: {_files(group)}.{said}")
            parts += [_section(one) for one in sections[group]]
    shipped = f"A file of `conf/study`, or of your own: `study=my.yaml`. Files that ship: {_files('study')}."
    parts.append(f"## A study\n\n{shipped}\n\n{_doc(Study)}\n\n{_table(study.keys)}")
    return "\n\n".join(parts)


def _section(section: KeySection) -> str:
    written = _table(section.keys) if section.keys else "No keys of its own."
    if not section.plugin:
        return written
    names = PLUGIN_GROUPS[section.group].names
    title = section.group if names == "name" else f"{section.group}.{names}"
    return f"### `{title}={section.plugin}`\n\n{written}"


def _files(group: str) -> str:
    return ", ".join(map(code, find_group_files(group)))


def _table(found: Iterable[ConfigKey]) -> str:
    rows = [(code(key.path), plain(key.type), code(key.default), plain(key.meaning)) for key in found]
    return table(("key", "type", "default", "meaning"), rows)


# ---------------------------------------- the page of the record


def record_page() -> str:
    """Return the page of all fields of a run's `record.json`, grouped by their classes."""
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
        "# The record\n\nFields of a run's `record.json`. `bench/core/record.schema.json` is a JSON schema of it. "
        "`spec` is what [the config](config.md) decodes to; unknown is `null`."
    )
    return "\n\n".join([head, *(_value(kind) for kind in rooms)])


def _value(kind: type[BaseModel]) -> str:
    own = list_keys(kind, flat=True)
    return f"## {kind.__name__}\n\n{_doc(kind)}" + (f"\n\n{_table(own)}" if own else "")


def _doc(kind: type[BaseModel]) -> str:
    return plain(" ".join(inspect.cleandoc(kind.__doc__ or "").split()))


def _inner(annotation: Any) -> Iterator[type[BaseModel]]:
    """Yield every pydantic class in a type annotation, at any depth."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in getattr(annotation, "__args__", ()):
        yield from _inner(argument)
