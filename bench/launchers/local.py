"""Start a run on this machine: a supervisor as a child process."""

import os
import signal
import subprocess

from bench.core.errors import UserError
from bench.core.processes import build_module_command
from bench.core.record import Limits
from bench.core.scheduling import LaunchPlan, Work
from bench.core.spec import RunSpec
from bench.runtime.process import set_parent_death_signal

QUEUES = False


class Options(Limits):
    """What a user may set in conf/launcher/local.yaml: when to give up, and whether to wait for other local runs."""

    lock: bool = True


def check(options: Options, spec: RunSpec) -> None:
    """Raise UserError for what one machine cannot run."""
    if spec.nodes > 1:
        raise UserError(f"nodes={spec.nodes}", "launcher=local starts one node", "set nodes=1")


def plan(work: Work, options: Options) -> LaunchPlan:
    """Return how `work` starts."""
    return LaunchPlan(tuple(build_module_command(work.module, *work.arguments)), {}, work.folder)


def submit(launch: LaunchPlan) -> subprocess.Popen[bytes]:
    """Start the supervisor. It is asked to end if this process dies, and does not hear the terminal's Ctrl-C itself, so
    that a record is written in any case."""
    return subprocess.Popen(
        launch.command,
        env=dict(os.environ) | launch.environment,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: set_parent_death_signal(signal.SIGTERM),
    )


def poll(handle: subprocess.Popen[bytes]) -> bool:
    """Whether the run has ended."""
    return handle.poll() is not None


def cancel(handle: subprocess.Popen[bytes]) -> None:
    """Ask the run to end; it leaves a record `cancelled`, unless it has only just been started: then it ends without a
    word, where SIGINT would make Python print a traceback."""
    if handle.poll() is None:
        handle.send_signal(signal.SIGTERM)
