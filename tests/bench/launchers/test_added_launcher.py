"""Test of an example on the pages of docs/extend: a launcher plug-in that starts work immediately on this machine."""

import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import write

from bench import launchers
from bench.core import plugins
from bench.core.scheduling import Work

PROGRAM = "import os, sys; open(sys.argv[1], 'w').write(str(os.nice(0)))"


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """Folder with the files of the example launchers. While the fixture is in use, these launchers can be imported."""
    write(tmp_path, "launcher")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launchers, "__path__", [*launchers.__path__, str(tmp_path / "bench/launchers")])
        patch.syspath_prepend(str(tmp_path))
        patch.setenv("PYTHONPATH", str(tmp_path))
        plugins._list_shipped.cache_clear()
        yield tmp_path
    for name in ("gently", "spool"):
        sys.modules.pop(f"bench.launchers.{name}", None)
    plugins._list_shipped.cache_clear()
    plugins._import_complete.cache_clear()


@pytest.mark.processes
def test_example_launcher_starts_work_at_lowest_priority_and_detects_its_end(root: Path) -> None:
    (root / "written.py").write_text(PROGRAM)
    launcher = importlib.import_module("bench.launchers.gently")
    assert launchers.load("gently") is launcher and not launcher.QUEUES
    told = root / "niceness"
    planned = launcher.plan(Work("work", root, "written", (str(told),)), launcher.Options())
    assert planned.command[:3] == ("nice", "-n", "19") and not told.exists(), "planning has no effect"
    handle = launcher.submit(planned)
    deadline = time.monotonic() + 60
    while not launcher.poll(handle) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert told.read_text() == "19"
