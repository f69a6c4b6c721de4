"""Where this process is: in a job of some launcher, or in none."""

import contextlib
from collections.abc import Mapping
from typing import NamedTuple

from bench.core import plugins
from bench.core.errors import UserError
from bench.core.plugins import QueueingLauncherPlugin
from bench.core.scheduling import JobContext


class JobAndLauncher(NamedTuple):
    """The job around this process and the launcher that knows it; none of either where there is no job."""

    launcher: QueueingLauncherPlugin | None = None
    context: JobContext = JobContext()


def find_context(name: str, environment: Mapping[str, str]) -> JobContext:
    """Return where in a job of the launcher `name` a process with this environment is."""
    launcher = plugins.load_queueing(name)
    return (launcher.context(environment) if launcher else None) or JobContext()


def find_job(environment: Mapping[str, str]) -> JobAndLauncher:
    """Return the job that a process with this environment is in, whoever submitted it: a run that was started here may
    be inside of a job too. A launcher that cannot be imported knows of none."""
    for name, launcher in plugins.list_usable(plugins.LAUNCHER):
        with contextlib.suppress(UserError):
            queueing = plugins.load_queueing(name) if launcher.QUEUES else None
            if queueing and (context := queueing.context(environment)):
                return JobAndLauncher(queueing, context)
    return JobAndLauncher()
