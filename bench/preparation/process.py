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

from bench.findings import Finding
from bench.measure.environment import cache
from bench.processes import module_command
from bench.staging import Needs
from bench.supervisor.rank_process import end_with_parent

_WITHOUT_NETWORK = (("unshare", "--net"), ("unshare", "--user", "--map-root-user", "--net"))  # as root, and as others
_END_S = 10.0

Mode = Literal["stage", "check"]


def findings(
    mode: Mode, kind: Needs, python: Sequence[str], variables: dict[str, str], follow: Callable[[str], None]
) -> Iterator[Finding]:
    """Stage or check in a process of its own, and yield what it finds; `follow` hears what it is doing."""
    noise = log()
    prefix = without_network() if mode == "check" else ()
    command = [*prefix, *module_command("bench.staging", mode, python=python)]
    with noise.open("a") as output:
        child = subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
            start_new_session=True,  # it hears of Ctrl-C from here, and clears away what is half done
            preexec_fn=lambda: end_with_parent(signal.SIGTERM),
        )
    try:
        for told in _conversation(child, kind):
            if isinstance(told, str):
                follow(f"{mode}: {told}")
            else:
                found = Finding(**told)
                yield found._replace(remedy=f"see {noise}") if found.state == "missing" and not found.remedy else found
        if code := child.wait():
            yield Finding(mode, "missing", f"its process ended with {code}", f"see {noise}")
    finally:
        _end(child)


def log() -> Path:
    """Return the file that keeps what libraries and compilers print."""
    path = cache(os.environ) / "prepare.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def _conversation(child: "subprocess.Popen[str]", kind: Needs) -> Iterator[Any]:
    assert child.stdin and child.stdout
    with contextlib.suppress(BrokenPipeError), child.stdin:  # it ended at once, which its exit code tells
        child.stdin.write(kind.model_dump_json(by_alias=True))
    with child.stdout:
        yield from map(json.loads, child.stdout)


def _end(child: "subprocess.Popen[str]") -> None:
    """Ask a process that still runs to end, then insist."""
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.wait()


def without_network() -> tuple[str, ...]:
    """Return the command that takes the network away from another one; nothing where that is not allowed."""
    for prefix in _WITHOUT_NETWORK if shutil.which("unshare") else ():
        if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
            return prefix
    return ()
