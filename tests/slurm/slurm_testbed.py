"""Access to a testbed (a small Slurm cluster on this machine) from a test: the `testbed` command, and Slurm's own
commands."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parents[2] / "slurm/testbed"
PATIENCE_S = 150.0  # on a busy machine


class Testbed:
    """Testbed of this test process. Its name and subnet differ from those of all other running test processes."""

    __test__ = False

    def __init__(self, suffix: str) -> None:
        pid = os.getpid()
        letters = "".join(chr(ord("a") + int(digit)) for digit in str(pid))
        self.name = f"t{letters}{suffix}"
        self.subnet = f"10.{100 + pid // 250 % 100}.{pid % 250}.{64 * 'abc'.index(suffix)}/26"
        self.folder = Path(f"/tmp/zeroscale-testbed-{self.name}")

    def __call__(self, command: str, *words: str, code: int | None = 0) -> subprocess.CompletedProcess[str]:
        """Run a `testbed` command, assert its exit code (any code if `code` is None), and return its result."""
        argv = [sys.executable, str(PROGRAM), command, "--name", self.name, *words]
        done = subprocess.run(argv, capture_output=True, text=True, timeout=PATIENCE_S)
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return done

    def up(self, *words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return self("up", "--subnet", self.subnet, *words, code=code)

    def slurm(self, *argv: str) -> str:
        """Run a Slurm command as a user of this testbed, and return its output."""
        environment = {**os.environ, "SLURM_CONF": str(self.folder / "slurm.conf")}
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def on(self, node: str, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run a command on a node, and return its result. Any exit code is accepted."""
        return self("exec", node, "--", *argv, code=None)

    def node(self, number: int) -> str:
        return f"{self.name}{number}"

    def wait_until_free(self) -> None:
        """Wait until no job occupies a node. A job may still occupy its nodes for a moment after its end."""
        wait_for(lambda: not self.slurm("squeue", "--noheader", "--states=running,completing"))

    @property
    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self("status", "--json", code=None).stdout)
        return found

    def state(self, node: str) -> str:
        return self.status["nodes"][node]["state"]

    def leftovers(self) -> list[str]:
        """Return the paths of all remains of this testbed, such as folders and network namespaces. Processes are not
        included."""
        folders = [self.folder, *Path("/run/netns").glob(f"{self.name}*"), *Path("/etc/netns").glob(f"{self.name}*")]
        folders += Path("/sys/class/net").glob(f"{self.name}*")
        return [str(path) for path in folders if path.exists()]


def wait_for(what: Callable[[], bool]) -> None:
    """Wait until the function `what` returns a true value. Fail after a time limit."""
    until = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < until, f"did not happen within {PATIENCE_S} s"
        time.sleep(0.2)
