"""Launchers, one file or package each; `bench.core.plugins` says what each of them defines."""

from collections.abc import Iterator
from importlib.util import find_spec

from bench.core import plugins
from bench.core.plugins import LauncherPlugin, QueueingLauncherPlugin, StartingLauncherPlugin


def load(name: str) -> LauncherPlugin:
    """Return the launcher named `name`; raise UserError if there is none."""
    return plugins.load(plugins.LAUNCHER, name)


def load_queueing(name: str) -> QueueingLauncherPlugin | None:
    """Return the launcher named `name`, or None if it starts work at once; raise UserError if there is none."""
    return plugins.load_queueing(name)


def load_starting(name: str) -> StartingLauncherPlugin:
    """Return a launcher that is known to start work at once."""
    return plugins.load(plugins.STARTING, name)


def find_cluster() -> str:
    """Return the launcher that is meant where a cluster is and none is named: the first that queues, of those that
    ship."""
    return next(name for name in _list_queueing() if find_spec(f"{__name__}.{name}"))


def format_queueing() -> str:
    """Return the choices that a person has who wants a queue, for a message."""
    return " or ".join(f"launcher={name}" for name in _list_queueing())


def _list_queueing() -> Iterator[str]:
    """Return the names of the launchers that queue; one that cannot be imported is none."""
    return (name for name, launcher in plugins.list_usable(plugins.LAUNCHER) if launcher.QUEUES)
