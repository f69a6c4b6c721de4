"""The device that a point runs on or is predicted for."""

import functools

from bench import launchers
from bench.config import Request
from bench.measure.environment import device_kind
from bench.spec import Device


def device(asked: Request) -> str | None:
    """Return the kind of device that `asked` would run on, "cpu" or "cuda"; None where another machine decides it."""
    if asked.machine.device or launchers.load(asked.launcher).QUEUES:
        return asked.machine.device
    return device_here()


def kind(asked: Request) -> Device:
    """Return the kind of device that `asked` is predicted for: where nobody says it, a GPU if there is one here."""
    return "cpu" if (device(asked) or device_here()) == "cpu" else "cuda"


@functools.cache  # asked for every point, and it looks at the file system
def device_here() -> str:
    """Return the kind of device of this machine."""
    return device_kind()
