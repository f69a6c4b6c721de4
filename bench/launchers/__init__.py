"""Launchers, each a module or package in this folder. `bench.core.plugins` documents the functions of a launcher."""

from collections.abc import Iterator
from importlib.util import find_spec

from bench.core import plugins
from bench.core.plugins import LauncherPlugin, load_queueing

__all__ = ["find_cluster", "format_queueing", "load", "load_queueing"]


def load(name: str) -> LauncherPlugin:
    """Return the launcher named `name`; raise UserError if there is none."""
    return plugins.load(plugins.LAUNCHER, name)


def find_cluster() -> str:
    """Return the name of the default launcher on a cluster: the first launcher that has a queue and is part of
    zeroscale, not a user's plug-in."""
    return next(name for name in _list_queueing() if find_spec(f"{__name__}.{name}"))


def format_queueing() -> str:
    """Return the launchers that submit to a queue, formatted as overrides for a message, e.g. "launcher=slurm"."""
    return " or ".join(f"launcher={name}" for name in _list_queueing())


def _list_queueing() -> Iterator[str]:
    """Yield the names of the launchers that submit to a queue. Launchers that cannot be imported are omitted."""
    return (name for name, launcher in plugins.list_usable(plugins.LAUNCHER) if launcher.QUEUES)
