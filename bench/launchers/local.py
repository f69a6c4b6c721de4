"""Launcher for runs on this machine. It starts a supervisor as a child process."""

import os
import signal
import subprocess

from bench.core.errors import UserError
from bench.core.processes import build_module_command
from bench.core.record import Limits
from bench.core.scheduling import LaunchPlan, Work
from bench.core.spec import RunSpec
from bench.runtime.process import start_child

QUEUES = False


class Options(Limits):
    """Options in conf/launcher/local.yaml: the limits of a run, and `lock`. If `lock` is true, a run waits until other
    local runs have ended."""

    lock: bool = True


def check(options: Options, spec: RunSpec) -> None:
    """Raise UserError if the run needs several nodes."""
    if spec.nodes > 1:
        raise UserError(f"nodes={spec.nodes}", "launcher=local runs on one node only", "set nodes=1")


def plan(work: Work, options: Options) -> LaunchPlan:
    """Return the command that starts a run's supervisor."""
    return LaunchPlan(tuple(build_module_command(work.module, *work.arguments)), {}, work.folder)


def submit(launch: LaunchPlan) -> subprocess.Popen[bytes]:
    """Start the supervisor of a run in its own session.

    The supervisor receives SIGTERM if this process dies. Ctrl-C in the terminal does not reach the supervisor, so it
    always writes a record.
    """
    return start_child(launch.command, env=dict(os.environ) | launch.environment)


def poll(handle: subprocess.Popen[bytes]) -> bool:
    """Return True if the run has ended."""
    return handle.poll() is not None


def cancel(handle: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to the supervisor, which then records the run as `cancelled`."""
    # Not SIGINT: Python would print a traceback if the supervisor has not installed its handlers yet.
    if handle.poll() is None:
        handle.send_signal(signal.SIGTERM)
