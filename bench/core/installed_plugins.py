"""Plug-ins of installed packages: entry points of the group `zeroscale.<kind>`, and calls of the plug-ins' functions.

A plug-in of another package may fail in any way. Its functions are called through a module that turns each exception,
and each result of a wrong type, into a `PluginError` with the names of the plug-in and its package. Commands that do
not need the plug-in skip it with a warning (`warn_skipped`).
"""

import collections.abc
import errno
import functools
import importlib.metadata
import importlib.util
import itertools
import logging
import numbers
import re
import sys
import types
from collections.abc import Callable
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from bench.core.errors import UserError

GROUP = "zeroscale"
"""Prefix of entry point groups: plug-ins of the kind `engine` are declared in the group `zeroscale.engine`."""
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_log = logging.getLogger(__name__)


class PluginError(UserError):
    """Error in a plug-in of another package. A command that does not need the plug-in skips it."""


warned: dict[str, str] = {}
"""Warnings of this process about skipped plug-ins, by plug-in."""


def warn_skipped(plugin: str, why: str) -> None:
    """Log that a plug-in, or a part of it, is skipped. Only the first warning about each plug-in is logged. With the
    option -v, it includes the traceback of the current exception."""
    if plugin not in warned:
        warned[plugin] = why
        traced = _log.isEnabledFor(logging.DEBUG) and sys.exc_info()[0] is not None
        _log.warning("%s skipped: %s", plugin, why.removeprefix(f"{plugin}: "), exc_info=traced)


@functools.cache
def find_entries(kind: str) -> dict[str, list[EntryPoint]]:
    """Return the entry points of a kind in all installed packages, by plug-in name. Several packages may declare
    plug-ins with the same name."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in importlib.metadata.entry_points(group=f"{GROUP}.{kind}"):
        found.setdefault(entry.name, []).append(entry)
    return found


def get_package(entry: EntryPoint) -> str:
    """Return the name of the package that declares an entry point."""
    return entry.dist.name if entry.dist else entry.module


def name_installed(kind: str, name: str) -> str | None:
    """Return the kind, name and package of an installed plug-in, as messages name it: "engine local_sgd of package
    mine". Return None for a plug-in of zeroscale."""
    entries = find_entries(kind).get(name)
    return f"{kind} {name} of package {get_package(entries[0])}" if entries else None


def list_installed_files(kind: str, name: str | None = None) -> list[Path]:
    """Return the Python files of all installed packages that declare plug-ins of `kind`, sorted. If `name` is given,
    only packages that declare the plug-in `name` are included. No package is imported."""
    declared = itertools.chain.from_iterable(find_entries(kind).values())
    roots = {entry.module.partition(".")[0] for entry in declared if name in (None, entry.name)}
    found: set[Path] = set()
    # The files are hashed, and the hash must change with any code of a package.
    for spec in filter(None, map(importlib.util.find_spec, roots)):
        for folder in spec.submodule_search_locations or ():
            found.update(Path(folder).rglob("*.py"))
        if spec.origin and spec.submodule_search_locations is None:
            found.add(Path(spec.origin))
    return sorted(found)


def guard(function: Callable[..., Any], plugin: str, task: str, result: Any = Any) -> Callable[..., Any]:
    """Return a function that calls a plug-in's `function`. The returned function raises PluginError if `function`
    raises an exception, or if its result is not of the type `result`. `plugin` is the plug-in's kind, name and package.
    `task` names the function in messages.

    UserErrors are raised unchanged. Errors due to a lack of memory or a full disk are also raised unchanged, because
    they are outcomes of a run.
    """

    @functools.wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        try:
            value = function(*args, **options)
        except (UserError, MemoryError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _NO_ROOM:
                raise
            why = f"{type(error).__name__}: {error}".partition("\n")[0]
            remedy = "repair or remove the package; the option -v prints the traceback"
            raise PluginError(plugin, f"{task} failed: {why}", remedy) from error
        if not is_of_type(value, result):
            rule = f"{task} returned {_shorten(value)}, which is not of the type {format_type(result)}"
            raise PluginError(plugin, rule, "repair the plug-in")
        return value

    return call


def guard_all(module: types.ModuleType, plugin: str, protocol: type[object]) -> types.ModuleType:
    """Return a copy of a plug-in's module in which `guard` wraps every public function. Raise PluginError if a constant
    of the module does not have the type that `protocol` declares for it. `plugin` is the plug-in's kind, name and
    package."""
    known = {name: member for base in reversed(protocol.__mro__) for name, member in vars(base).items()}
    copy = types.ModuleType(module.__name__, module.__doc__)
    for name, value in vars(module).items():
        if isinstance(value, types.FunctionType) and not name.startswith("_"):
            declared = getattr(known.get(name), "__annotations__", {}).get("return")
            value = guard(value, plugin, name, Any if declared is None else declared)
        vars(copy)[name] = value
    for base in protocol.__mro__:
        for name, kind in vars(base).get("__annotations__", {}).items():
            if hasattr(module, name) and not is_of_type(getattr(module, name), kind):
                rule = f"{name} is {_shorten(getattr(module, name))}, which is not of the type {format_type(kind)}"
                raise PluginError(plugin, rule, "repair the plug-in")
    return copy


def is_of_type(value: object, kind: Any) -> bool:
    """Return True if a value fits a type annotation. Elements of a tuple are checked; elements of other collections are
    not. For an annotation that is a string, return True, because names in the string may be unknown in this module."""
    origin, parts = get_origin(kind), get_args(kind)
    if kind is Any or isinstance(kind, str):
        return True
    if kind is int:
        return isinstance(value, numbers.Integral)  # includes numpy's integers
    if origin in (Union, types.UnionType):
        return any(is_of_type(value, one) for one in parts)
    if origin is Literal:
        return value in parts
    if origin is type:
        return isinstance(value, type) and issubclass(value, parts[0])
    if origin is tuple and parts[1:] == (...,):
        return isinstance(value, tuple) and all(is_of_type(one, parts[0]) for one in value)
    if origin is collections.abc.Sequence and isinstance(value, str):
        return False
    return isinstance(value, origin or kind)


def format_type(kind: Any) -> str:
    """Return a type annotation as text, without the modules of its classes."""
    if isinstance(kind, type) and not get_args(kind):
        return "None" if kind is types.NoneType else kind.__name__
    parts = [format_type(part) for part in get_args(kind) if part is not ...]
    if get_origin(kind) in (Union, types.UnionType):
        return " | ".join(parts)
    if get_origin(kind) is tuple:
        return f"tuple[{parts[0]}, ...]"
    return re.sub(r"[a-z_]\w*\.", "", str(kind))


def _shorten(value: object) -> str:
    text = repr(value).partition("\n")[0]
    return text if len(text) <= 80 else f"{text[:80]}…"
