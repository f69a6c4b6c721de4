import os
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("patient", deadline=None)  # an example may take long on a busy machine, and be right
settings.load_profile("patient")

# `nohup make test &` begins with it ignored, and so would all that tests start and interrupt
signal.signal(signal.SIGINT, signal.default_int_handler)

# before torch is imported: threads of two who test on two cores wait for each other by spinning
os.environ.setdefault("OMP_NUM_THREADS", "1")

SLURM = Path(__file__).parent / "slurm"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest comes first. Two work at the tests, each at a file of its own (`--dist loadfile`), since the
    tests of a file share what takes long to make."""
    starting = {item.path for item in items if item.get_closest_marker("processes")}
    items.sort(key=lambda item: (SLURM not in item.path.parents, item.path not in starting))


# local runs of a session of tests wait for each other, and not for those of another
_SESSION = tempfile.TemporaryDirectory(prefix="zeroscale-tests-")
os.environ["XDG_RUNTIME_DIR"] = _SESSION.name
