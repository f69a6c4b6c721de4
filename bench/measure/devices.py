"""NVIDIA devices as the driver's own library (NVML) tells of them: names, clocks, power, energy. Empty without any."""

import functools
from collections.abc import Callable, Collection
from typing import Any, NamedTuple


@functools.cache
def _load_nvml() -> Any:
    """Return the initialised NVML module, or None where there is no driver to ask."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, no permission: each means that nothing can be asked
        return None
    return pynvml


def count_devices() -> int:
    """Return the number of NVIDIA devices."""
    nvml = _load_nvml()
    return int(nvml.nvmlDeviceGetCount()) if nvml else 0


def read_name(device: int | str) -> str | None:
    """Return what the device calls itself, e.g. "NVIDIA H200". Devices are known by the driver's index or by UUID."""
    answer: str | None = _ask_device(device, lambda nvml, handle: str(nvml.nvmlDeviceGetName(handle)))
    return answer


def read_driver_version() -> str | None:
    """Return the driver's version."""
    nvml = _load_nvml()
    return str(nvml.nvmlSystemGetDriverVersion()) if nvml else None


def read_memory_bytes(device: int | str = 0) -> int | None:
    """Return the memory of a device that nobody uses."""
    answer: int | None = _ask_device(device, lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).free))
    return answer


def read_energy_j(device: int | str) -> float | None:
    """Return the energy a device has used since its driver was loaded, in joules; None where it keeps no count."""
    answer: float | None = _ask_device(
        device, lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
    )
    return answer


class Others(NamedTuple):
    """Processes on a device that are not of a run; None where the driver does not tell."""

    processes: int | None = None
    bytes: int | None = None


def others(device: int | str, own: Collection[int]) -> Others:
    """Return who else computes on a device; `own` are process numbers of the run. In a container the driver may know
    its processes by other numbers: then those that are more than one are others, and their memory is unknown."""
    found = _ask_device(device, lambda nvml, handle: nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    if found is None:
        return Others()
    if any(process.pid in own for process in found) or not found:
        foreign = [process for process in found if process.pid not in own]
        used = [process.usedGpuMemory for process in foreign]
        return Others(len(foreign), None if None in used else sum(used))
    return Others(len(found) - 1, 0 if len(found) == 1 else None)


def throttled_s(device: int | str) -> dict[str, float]:
    """Return for how long a device has been held back so far, in seconds by reason: `power` by its power cap, `thermal`
    by its temperature."""
    reasons = {"power": "NVML_PERF_POLICY_POWER", "thermal": "NVML_PERF_POLICY_THERMAL"}
    values = {
        reason: _ask_device(
            device,
            lambda nvml, handle, policy=policy: (  # type: ignore[misc]
                nvml.nvmlDeviceGetViolationStatus(handle, getattr(nvml, policy)).violationTime / 1e9
            ),
        )
        for reason, policy in reasons.items()
    }
    return {reason: seconds for reason, seconds in values.items() if seconds is not None}


def state(device: int | str) -> dict[str, float | None]:
    """Return how a device is now: its clock in MHz, its temperature in °C, its memory in use by all in bytes."""
    questions = {name: _QUESTIONS[name] for name in ("sm_clock_mhz", "temperature_c")}
    questions["used_bytes"] = lambda nvml, handle: nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2).used
    return {name: _ask_device(device, question) for name, question in questions.items()}


_QUESTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "name": lambda nvml, handle: str(nvml.nvmlDeviceGetName(handle)),
    "sm_clock_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
    "power_cap_w": lambda nvml, handle: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
    "temperature_c": lambda nvml, handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    "throttle_reasons": lambda nvml, handle: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
}


def read_states() -> list[dict[str, Any]]:
    """Return name, clocks in MHz, power cap in W and temperature in °C of every device, now."""
    return [
        {key: _ask_device(index, question) for key, question in _QUESTIONS.items()} for index in range(count_devices())
    ]


def _ask_device(device: int | str, question: Callable[[Any, Any], Any]) -> Any:
    nvml = _load_nvml()
    if not nvml:
        return None
    try:
        by_index = isinstance(device, int)
        handle = nvml.nvmlDeviceGetHandleByIndex(device) if by_index else nvml.nvmlDeviceGetHandleByUUID(device)
        return question(nvml, handle)
    except nvml.NVMLError:
        return None  # there is no such device, or it does not tell
