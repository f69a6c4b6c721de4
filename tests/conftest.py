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

gc.disable()  # until all tests are collected: that imports torch and hundreds of modules, and none of it is garbage

settings.register_profile("patient", deadline=None)  # an example may take long on a busy machine, and be right
settings.load_profile("patient")

# `nohup make test &` begins with it ignored, and so would all that tests start and interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)

# before torch is imported: threads of two who test on two cores wait for each other by spinning
os.environ.setdefault("OMP_NUM_THREADS", "1")

warm.install()

SLURM = Path(__file__).parent / "slurm"
LONG = ("test_golden.py", "test_docs.py", "test_t5.py", "test_consolidated.py", "test_report.py")
"""Files without processes that take ten seconds or more."""


class ByFile(LoadScopeScheduling):
    """Assign tests to workers. A file is one worker's, since its tests share what takes long to make. The tests of
    Slurm mostly wait, and share two testbeds: one worker has those of mishaps, another has the rest."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        if not path.startswith("tests/slurm/"):
            return path
        return "slurm: mishaps" if Path(path).name.startswith(("test_drills", "test_chaos")) else "slurm"


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> ByFile:
    return ByFile(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the files that take longest first, so that no worker is left alone with them at the end."""
    starting = {item.path for item in items if item.get_closest_marker("processes")}
    items.sort(key=lambda item: (SLURM not in item.path.parents, item.path not in starting, item.path.name not in LONG))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Start the processes of a test marked `cold` in fresh interpreters, as a user does; fork all others."""
    if item.get_closest_marker("cold"):
        with warm.cold():
            return (yield)
    return (yield)


def pytest_collection_finish() -> None:
    """What is imported by now stays: no search for garbage has to go through it again."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 50)  # as a command has them


# local runs of a session of tests wait for each other, and not for those of another
_SESSION = tempfile.TemporaryDirectory(prefix="zeroscale-tests-")
os.environ["XDG_RUNTIME_DIR"] = _SESSION.name
