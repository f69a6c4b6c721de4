"""What passes to a launcher and back: the work that is to start, and how it starts."""

from pathlib import Path
from typing import NamedTuple


class Work(NamedTuple):
    """What a launcher is to start: one command on each of some nodes.

    `module` is run as `python -m MODULE ARGUMENT …`, on every node once, with `folder` for the launcher's own files.
    The folder of the study, two levels above it, is a POSIX file system that every node and the submitting machine
    see: runs are claimed there by mkdir, files are linked into place, and the nodes of a job find each other by it.
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
    """How work starts: a command, what is added to its environment, the folder it belongs to, and files to write.

    `files` are what a dry run shows; the command is what a person would type once they are written.
    """

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    files: dict[Path, str] = {}
