"""Launchers, one file or package each. The contract of such a file:

`QUEUES`                     whether somebody else starts the work, later; else it starts at once and is waited for
`Options`                    a pydantic model: what a user may set in conf/launcher; `Limits` and more
`check(options, spec)`       raises UserError for what this launcher cannot start
`plan(work, options)`        a LaunchPlan: pure, so that printing it is the dry run
`submit(plan)`               the one effect; returns a handle
`poll(handle)`, `cancel(handle)`

and, where it queues:
`ask(names)`                 the state of all jobs of these names and their tasks, asked for once
`cancel_all(handles)`
`limits(options)`            what the cluster takes: sizes of arrays, jobs in the queue, minutes
"""

from pathlib import Path
from typing import NamedTuple, cast

from bench import plugins
from bench.errors import UserError
from bench.plugins import LauncherPlugin, QueueingLauncherPlugin


class SchedulerAway(UserError):
    """The scheduler did not answer, which says nothing about its jobs."""


class Work(NamedTuple):
    """What a launcher is to start: one command on each of some nodes.

    `module` is run as `python -m MODULE ARGUMENT …`, on every node once, with `folder` for the launcher's own files.
    """

    name: str  # unique, safe in a shell and as a file name
    folder: Path
    module: str
    arguments: tuple[str, ...]
    nodes: int = 1
    devices_per_node: int = 0  # 0: it needs none, and runs once, on the first node alone
    time_limit_min: int | None = None  # None: the launcher's own choice
    tasks: int | None = None  # of a job array: the command runs once for each of so many tasks
    after: tuple[str, ...] = ()  # handles of earlier work that must have ended, however
    exclude: tuple[str, ...] = ()  # nodes that must not be used


class LaunchPlan(NamedTuple):
    """How work starts: a command, what is added to its environment, the folder it belongs to, and files to write."""

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    files: dict[Path, str] = {}


def load(name: str) -> LauncherPlugin:
    """Return the launcher file named `name`; raise UserError if there is none."""
    return plugins.load(plugins.LAUNCHER, name)


def load_queueing(name: str) -> QueueingLauncherPlugin:
    """Return a launcher that is known to queue."""
    return cast(QueueingLauncherPlugin, load(name))
