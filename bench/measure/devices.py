"""NVIDIA devices as the driver's own library (NVML) tells of them: names, clocks, power, energy. Empty without any."""

import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def _nvml() -> Any:
    """Return the initialised NVML module, or None where there is no driver to ask."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, no permission: each means that nothing can be asked
        return None
    return pynvml


def count() -> int:
    """Return the number of NVIDIA devices."""
    nvml = _nvml()
    return int(nvml.nvmlDeviceGetCount()) if nvml else 0


def name(device: int | str) -> str | None:
    """Return what the device calls itself, e.g. "NVIDIA H200". Devices are known by the driver's index or by UUID."""
    answer: str | None = _ask(device, lambda nvml, handle: str(nvml.nvmlDeviceGetName(handle)))
    return answer


def driver_version() -> str | None:
    """Return the driver's version."""
    nvml = _nvml()
    return str(nvml.nvmlSystemGetDriverVersion()) if nvml else None


def memory_bytes(device: int | str = 0) -> int | None:
    """Return the memory of a device that nobody uses."""
    answer: int | None = _ask(device, lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).free))
    return answer


def energy_j(device: int | str) -> float | None:
    """Return the energy a device has used since its driver was loaded, in joules; None where it keeps no count."""
    answer: float | None = _ask(device, lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3)
    return answer


def snapshot() -> list[dict[str, Any]]:
    """Return name, clocks in MHz, power cap in W and temperature in °C of every device, now."""
    questions: dict[str, Callable[[Any, Any], Any]] = {
        "name": lambda nvml, handle: str(nvml.nvmlDeviceGetName(handle)),
        "sm_clock_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
        "memory_clock_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
        "power_cap_w": lambda nvml, handle: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        "temperature_c": lambda nvml, handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        "throttle_reasons": lambda nvml, handle: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    }
    return [{key: _ask(index, question) for key, question in questions.items()} for index in range(count())]


def _ask(device: int | str, question: Callable[[Any, Any], Any]) -> Any:
    nvml = _nvml()
    if not nvml:
        return None
    try:
        by_index = isinstance(device, int)
        handle = nvml.nvmlDeviceGetHandleByIndex(device) if by_index else nvml.nvmlDeviceGetHandleByUUID(device)
        return question(nvml, handle)
    except nvml.NVMLError:
        return None  # there is no such device, or it does not tell
