"""Launchers, one file or package each; `bench.plugins` says what each of them defines."""

from bench import plugins
from bench.plugins import LauncherPlugin, QueueingLauncherPlugin, StartingLauncherPlugin


def load(name: str) -> LauncherPlugin:
    """Return the launcher named `name`; raise UserError if there is none."""
    return plugins.load(plugins.LAUNCHER, name)


def queueing(name: str) -> QueueingLauncherPlugin | None:
    """Return the launcher named `name`, or None if it starts work at once; raise UserError if there is none."""
    return plugins.queueing(name)


def starting(name: str) -> StartingLauncherPlugin:
    """Return a launcher that is known to start work at once."""
    return plugins.load(plugins.STARTING, name)
