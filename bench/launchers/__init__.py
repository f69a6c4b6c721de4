"""Launchers, one file each. The contract of such a file:

`Options`                    a pydantic model: what a user may set in conf/launcher
`check(options, spec)`       raises UserError for what this launcher cannot start
`plan(folder, options)`      a LaunchPlan: pure, so that printing it is the dry run
`submit(plan)`               the one effect; returns a handle
`poll(handle)` `cancel(handle)`
"""

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from bench.errors import UserError, nearest


class LaunchPlan(NamedTuple):
    """How one attempt starts: a command, what is added to its environment, and the folder of its evidence."""

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path


def load(name: str) -> ModuleType:
    """Return the launcher file named `name`; raise UserError if there is none."""
    known = [module.name for module in pkgutil.iter_modules(__path__)]
    if name not in known:
        raise UserError(f"launcher.name={name}", "no such file in bench/launchers", nearest(name, known))
    return importlib.import_module(f"{__name__}.{name}")
