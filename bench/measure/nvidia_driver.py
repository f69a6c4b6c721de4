"""NVIDIA's devices by their driver's own library, NVML. A slice of one (MIG) is known by its own UUID; what only the
whole device can tell, its clock and what holds it back, is asked of that."""

import time
from collections.abc import Callable
from typing import Any

from bench.measure.device_driver import Question

_OF_THE_WHOLE: tuple[Question, ...] = (
    "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "throttle_reasons", "throttled",
)  # fmt: skip
"""The same for every slice of a device. Its energy and its power cap are shared with others, and stay unknown."""


class NvidiaDriver:
    """See `bench.measure.device_driver`."""

    def __init__(self, nvml: Any) -> None:
        """`nvml` is the module, initialised."""
        self._nvml = nvml

    @classmethod
    def load(cls) -> "NvidiaDriver | None":
        """Return the driver, None where there is none to ask."""
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception:  # no package, no driver, no permission: each means that nothing can be asked
            return None
        return cls(pynvml)

    def count(self) -> int:
        return int(self._nvml.nvmlDeviceGetCount())

    def version(self) -> str | None:
        return str(self._nvml.nvmlSystemGetDriverVersion())

    def ask(self, device: int | str, question: Question) -> Any:
        try:
            handle = self._find_handle(device)
            return _ANSWERS[question](self._nvml, self._find_whole(handle) if question in _OF_THE_WHOLE else handle)
        except self._nvml.NVMLError:  # there is no such device, or it does not tell
            return None

    def _find_whole(self, handle: Any) -> Any:
        """Return the device that this is a slice of, or the device itself."""
        try:
            return self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        except self._nvml.NVMLError:
            return handle

    def _find_handle(self, device: int | str) -> Any:
        """Return NVML's handle of a device or slice. torch tells the UUID of a slice as that of a device."""
        if isinstance(device, int):
            return self._nvml.nvmlDeviceGetHandleByIndex(device)
        try:
            return self._nvml.nvmlDeviceGetHandleByUUID(device)
        except self._nvml.NVMLError:
            if not device.startswith("GPU-"):
                raise
            return self._nvml.nvmlDeviceGetHandleByUUID(device.replace("GPU-", "MIG-", 1))


def _list_processes(nvml: Any, handle: Any) -> list[tuple[int, int | None]]:
    return [(process.pid, process.usedGpuMemory) for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]


def _count_throttled(nvml: Any, handle: Any) -> dict[str, float]:
    """Return seconds of the counters' violation times, and of the clock."""
    policies = {"power": nvml.NVML_PERF_POLICY_POWER, "thermal": nvml.NVML_PERF_POLICY_THERMAL}
    found = {"all": time.perf_counter()}
    for reason, policy in policies.items():
        try:
            found[reason] = nvml.nvmlDeviceGetViolationStatus(handle, policy).violationTime / 1e9
        except nvml.NVMLError:
            continue  # one of them may be unknown
    if len(found) == 1:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    return found


_ANSWERS: dict[Question, Callable[[Any, Any], Any]] = {
    "name": lambda nvml, handle: str(nvml.nvmlDeviceGetName(handle)),
    "free_bytes": lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).free),
    "energy_j": lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,
    "processes": _list_processes,
    "throttled": _count_throttled,
    "sm_clock_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
    "power_cap_w": lambda nvml, handle: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
    "temperature_c": lambda nvml, handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    "throttle_reasons": lambda nvml, handle: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
}
