"""The GPUs of this machine as the library of their driver tells of them: names, clocks, power, energy. None without."""

import functools
from collections.abc import Collection
from typing import Any, NamedTuple

from bench.measure.amd_driver import AmdDriver
from bench.measure.device_driver import STATE, DeviceDriver, Question
from bench.measure.nvidia_driver import NvidiaDriver


@functools.cache
def _load_driver() -> DeviceDriver | None:
    """Return the driver of the first maker that has a device here, or None."""
    found: list[DeviceDriver | None] = [NvidiaDriver.load(), AmdDriver.load()]
    return next((driver for driver in found if driver and driver.count()), None)


def _query(device: int | str, question: Question) -> Any:
    driver = _load_driver()
    return driver.ask(device, question) if driver else None


def count_devices() -> int:
    """Return the number of devices."""
    driver = _load_driver()
    return driver.count() if driver else 0


def read_name(device: int | str) -> str | None:
    """Return what the device calls itself, e.g. "NVIDIA H200". Devices are known by the driver's number, or by UUID;
    those of AMD by their PCI address."""
    answer: str | None = _query(device, "name")
    return answer


def read_driver_version() -> str | None:
    """Return the driver's version."""
    driver = _load_driver()
    return driver.version() if driver else None


def read_memory_bytes(device: int | str = 0) -> int | None:
    """Return the memory of a device that nobody uses."""
    answer: int | None = _query(device, "free_bytes")
    return answer


def read_energy_j(device: int | str) -> float | None:
    """Return the energy a device has used since its driver was loaded, in joules; None where it keeps no count."""
    answer: float | None = _query(device, "energy_j")
    return answer


class Others(NamedTuple):
    """Processes on a device that are not of a run; None where the driver does not tell."""

    processes: int | None = None
    bytes: int | None = None


def others(device: int | str, own: Collection[int]) -> Others:
    """Return who else computes on a device; `own` are process numbers of the run. In a container the driver may know
    its processes by other numbers: then those that are more than one are others, and their memory is unknown."""
    found: list[tuple[int, int | None]] | None = _query(device, "processes")
    if found is None:
        return Others()
    if any(number in own for number, _ in found) or not found:
        used = [taken for number, taken in found if number not in own]
        return Others(len(used), None if None in used else sum(taken for taken in used if taken is not None))
    return Others(len(found) - 1, 0 if len(found) == 1 else None)


def count_throttled(device: int | str) -> dict[str, float]:
    """Return counts that grow while a device is held back, `power` by its power cap and `thermal` by its temperature,
    and `all`, which grows always: between two looks, a reason's part of that is its share of the time."""
    answer: dict[str, float] | None = _query(device, "throttled")
    return answer or {}


def state(device: int | str) -> dict[str, float | None]:
    """Return how a device is now: its clock in MHz and its temperature in °C."""
    return {"sm_clock_mhz": _query(device, "sm_clock_mhz"), "temperature_c": _query(device, "temperature_c")}


def read_states() -> list[dict[str, Any]]:
    """Return name, clocks in MHz, power cap in W and temperature in °C of every device, now."""
    return [{question: _query(number, question) for question in STATE} for number in range(count_devices())]
