import gc
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from tests import warm

gc.disable()  # off during collection, because the imported modules never become garbage

settings.register_profile("patient", deadline=None)  # hypothesis examples may take long on a busy machine
settings.load_profile("patient")

# Under `nohup make test &`, SIGINT is ignored. Without this line, processes that tests start would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Set this before torch is imported. With more threads, two test processes on two cores would busy-wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")

warm.install()

SLURM = Path(__file__).parent / "slurm"
LONG = ("test_golden.py", "test_docs.py", "test_t5.py", "test_consolidated.py", "test_report.py")
"""Names of test files that start no processes but take ten seconds or more."""


class ByFile(LoadScopeScheduling):
    """Assigns tests to pytest-xdist workers: all tests of a file run on the same worker, since they share slow
    fixtures.

    Slurm tests mostly wait and share two testbeds. One worker runs the Slurm tests with injected failures, another
    worker all other Slurm tests.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        if not path.startswith("tests/slurm/"):
            return path
        return "slurm: mishaps" if Path(path).name.startswith(("test_drills", "test_chaos")) else "slurm"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the test files that take longest first, so that no worker is still running them when all others have
    finished."""
    starting = {item.path for item in items if item.get_closest_marker("processes")}
    items.sort(key=lambda item: (SLURM not in item.path.parents, item.path not in starting, item.path.name not in LONG))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Choose how a test starts processes. Tests marked `cold` start processes in new interpreters, as a user does. In
    all other tests, processes are forked from a server that has already imported torch and the engines."""
    if item.get_closest_marker("cold"):
        with warm.cold():
            return (yield)
    return (yield)


def pytest_collection_finish() -> None:
    """Freeze all objects that exist after pytest has collected the tests. Python's garbage collector then skips these
    objects. They are mostly imported modules, which stay in memory until the end."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 50)  # the same thresholds as in bench.cli


# Local runs wait for a lock in this folder. With its own folder, a session does not wait for other sessions' runs.
_SESSION = tempfile.TemporaryDirectory(prefix="zeroscale-tests-")
os.environ["XDG_RUNTIME_DIR"] = _SESSION.name
