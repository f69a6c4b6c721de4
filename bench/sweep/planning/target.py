"""The device that a point runs on or is predicted for."""

import functools

from bench import launchers
from bench.config.compose import Request
from bench.measure.environment import find_device_kind
from bench.spec import Device


def find_device(composed: Request) -> str | None:
    """Return the kind of device that `composed` would run on, "cpu" or "cuda"; None if another machine decides it."""
    if composed.machine.device or launchers.load(composed.launcher).QUEUES:
        return composed.machine.device
    return find_local_device()


def find_predicted_device(composed: Request) -> Device:
    """Return the kind of device that `composed` is predicted for; if undecided, a GPU if this machine has one."""
    return "cpu" if (find_device(composed) or find_local_device()) == "cpu" else "cuda"


@functools.cache  # asked for every point, and it looks at the file system
def find_local_device() -> str:
    """Return the kind of device of this machine."""
    return find_device_kind()
