"""The process that stages and checks, seen from the command: started, listened to, and ended with what it began."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from bench.checks import Check
from bench.files import get_cache_folder
from bench.preparation.staging import StagingNeeds
from bench.processes import build_module_command
from bench.runtime.process import set_parent_death_signal

_WITHOUT_NETWORK = (("unshare", "--net"), ("unshare", "--user", "--map-root-user", "--net"))  # as root, and as others
_END_S = 10.0

StagerMode = Literal["stage", "check"]


def run_checks(
    mode: StagerMode,
    kind: StagingNeeds,
    python: Sequence[str],
    variables: dict[str, str],
    follow: Callable[[str], None],
) -> Iterator[Check]:
    """Stage or check in a process of its own, and yield what it finds; `follow` hears what it is doing."""
    noise = create_log_path()
    prefix = find_network_isolation() if mode == "check" else ()
    command = [*prefix, *build_module_command("bench.preparation.staging", mode, python=python)]
    with noise.open("a") as output:
        child = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,  # it hears of Ctrl-C from here, and clears away what is half done
            preexec_fn=lambda: set_parent_death_signal(signal.SIGTERM),
        )
    try:
        for message in _read_messages(child, kind):
            if isinstance(message, str):
                follow(f"{mode}: {message}")
            else:
                found = Check(**message)
                yield found._replace(remedy=f"see {noise}") if found.state == "missing" and not found.remedy else found
        if code := child.wait():
            yield Check(mode, "missing", f"its process ended with {code}", f"see {noise}")
    finally:
        _end_child(child)


def create_log_path() -> Path:
    """Return the file that keeps what libraries and compilers print."""
    path = get_cache_folder(os.environ) / "prepare.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _read_messages(child: "subprocess.Popen[str]", kind: StagingNeeds) -> Iterator[Any]:
    assert child.stdin and child.stdout
    with contextlib.suppress(BrokenPipeError), child.stdin:  # it ended at once, which its exit code tells
        child.stdin.write(kind.model_dump_json(by_alias=True))
    with child.stdout:
        yield from map(json.loads, child.stdout)


def _end_child(child: "subprocess.Popen[str]") -> None:
    """Ask a process that still runs to end, then insist."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def find_network_isolation() -> tuple[str, ...]:
    """Return the command that takes the network away from another one; nothing where that is not allowed."""
    for prefix in _WITHOUT_NETWORK if shutil.which("unshare") else ():
        if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
            return prefix
    return ()
