"""What is asked for as a user gives it: a study, and overrides as texts of Hydra's grammar or as a mapping."""

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.config import compose
from bench.errors import UserError
from bench.study import Overrides, Study

GivenOverrides = str | Sequence[str] | Mapping[str, Any]
"""Overrides: "engine=zero2 batch.micro=4", ["engine=zero2", "batch.micro=4"] or {"engine": "zero2", "batch.micro": 4}.

In a mapping a list or tuple stands for several values, as a comma list does in a text.
"""
_BARE = re.compile(r"[\w./:+-]+")


def format_overrides(given: GivenOverrides) -> tuple[str, ...]:
    """Return overrides as the command takes them."""
    if isinstance(given, Mapping):
        return tuple(
            f"{key}={','.join(map(_format_value, value if isinstance(value, list | tuple) else [value]))}"
            for key, value in given.items()
        )
    return tuple(shlex.split(given)) if isinstance(given, str) else tuple(map(str, given))


def _format_value(value: Any) -> str:
    """Return one value in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{_format_value(key)}:{_format_value(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_format_value, value)) + "]"
    text = str(value)
    if _BARE.fullmatch(text):
        return text
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", re.sub(r"\\+$", lambda tail: 2 * tail[0], text)) + "'"


def find_study(
    study: Study | str | Path | None, given: GivenOverrides, config_dir: Path | None, verb: str
) -> tuple[Study, Overrides]:
    """Return the study that is asked for, by itself or as `study=NAME` among the overrides, and all other overrides;
    a study without points of its own where none is. `verb` is what to call again for a second one."""
    parsed = compose.parse_overrides(format_overrides(given))
    named = [str(value) for key, values in parsed if key == "study" for value in values]
    rest = [(key, values) for key, values in parsed if key != "study"]
    named += [] if study is None else [study.name if isinstance(study, Study) else str(study)]
    if len(named) > 1:
        raise UserError(f"study={','.join(named)}", "one study at a time", f"call {verb} once for each")
    found = study if isinstance(study, Study) else None
    if found is None:
        found = compose.read_study(named[0], config_dir) if named else Study(name="adhoc")
    if found.search and found.axes:
        rule = f"has axes ({', '.join(found.axes)}) beside a search, which varies the fields of its space alone"
        raise UserError(f"study={found.name}", rule, "move the axes into search.space, or leave one section out")
    return found, rest
