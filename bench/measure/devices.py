"""The GPUs of this machine as the library of their driver tells of them: names, clocks, power, energy. None without.

AMD's is written by AMD SMI's manual (https://rocm.docs.amd.com/projects/amdsmi), and not tried on a device yet. Names
of fields changed between its versions; where there are several, all are looked for.
"""

import functools
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, NamedTuple, Protocol

Question = Literal[
    "name",
    "free_bytes",  # of its memory
    "energy_j",  # used since its driver was loaded
    "processes",  # a list of (process number, bytes, None where the driver does not tell) that compute on it
    "throttled",  # counts that grow while it is held back, by reason: power, thermal; and `all`, which always grows
    "sm_clock_mhz",
    "memory_clock_mhz",
    "power_cap_w",
    "temperature_c",
    "throttle_reasons",  # bits, as the maker numbers them
]
STATE: tuple[Question, ...] = (
    "name", "sm_clock_mhz", "memory_clock_mhz", "power_cap_w", "temperature_c", "throttle_reasons",
)  # fmt: skip
"""What a record keeps of every device."""


class DeviceDriver(Protocol):
    """A maker's devices here, as the library of their driver tells of them."""

    def count(self) -> int:
        """Return how many there are."""

    def version(self) -> str | None:
        """Return the driver's version."""

    def ask(self, device: int | str, question: Question) -> Any:
        """Return the answer about a device, known by the driver's number or by a name of its own; None where there is
        no such device, or it does not tell."""


_OF_THE_WHOLE: tuple[Question, ...] = (
    "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "throttle_reasons", "throttled",
)  # fmt: skip
"""The same for every slice of a device. Its energy and its power cap are shared with others, and stay unknown."""


class NvidiaDriver:
    """NVIDIA's devices by NVML. A slice of one (MIG) is known by its own UUID; what only the whole device can tell, its
    clock and what holds it back, is asked of that."""

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
            return _NVML_ANSWERS[question](
                self._nvml, self._find_whole(handle) if question in _OF_THE_WHOLE else handle
            )
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


def _list_nvidia_processes(nvml: Any, handle: Any) -> list[tuple[int, int | None]]:
    return [(process.pid, process.usedGpuMemory) for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)]


def _count_nvidia_throttled(nvml: Any, handle: Any) -> dict[str, float]:
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


_NVML_ANSWERS: dict[Question, Callable[[Any, Any], Any]] = {
    "name": lambda nvml, handle: str(nvml.nvmlDeviceGetName(handle)),
    "free_bytes": lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).free),
    "energy_j": lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,
    "processes": _list_nvidia_processes,
    "throttled": _count_nvidia_throttled,
    "sm_clock_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
    "power_cap_w": lambda nvml, handle: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
    "temperature_c": lambda nvml, handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    "throttle_reasons": lambda nvml, handle: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
}


_UNSUPPORTED = 2**64 - 1
_MICRO = 1e-6


class AmdDriver:
    """AMD's devices by amdsmi, which comes with ROCm. A device's own name is its PCI address, as torch tells it too."""

    def __init__(self, amdsmi: Any) -> None:
        """`amdsmi` is the module, initialised."""
        self._amdsmi = amdsmi

    @classmethod
    def load(cls) -> "AmdDriver | None":
        """Return the driver, None where there is none to ask."""
        try:
            import amdsmi  # type: ignore[import-not-found]

            amdsmi.amdsmi_init()
        except Exception:  # no package, no driver, no permission: each means that nothing can be asked
            return None
        return cls(amdsmi)

    def count(self) -> int:
        return len(self._amdsmi.amdsmi_get_processor_handles())

    def version(self) -> str | None:
        try:
            answer = self._amdsmi.amdsmi_get_gpu_driver_info(self._amdsmi.amdsmi_get_processor_handles()[0])
            return str(answer["driver_version"])
        except (self._amdsmi.AmdSmiException, KeyError, IndexError):
            return None

    def ask(self, device: int | str, question: Question) -> Any:
        smi = self._amdsmi
        try:
            if isinstance(device, int):
                handle = smi.amdsmi_get_processor_handles()[device]
            else:
                handle = smi.amdsmi_get_processor_handle_from_bdf(device)
            answer = _AMD_ANSWERS[question](smi, handle)
        except (smi.AmdSmiException, AttributeError, KeyError, IndexError, TypeError, ValueError):
            return None  # there is no such device, it does not tell, or this version of the library does not
        return None if answer == "N/A" else answer


def _take(answer: Mapping[str, Any], *names: str) -> Any:
    """Return the first of some fields that is there; KeyError where none is."""
    for name in names:
        if name in answer:
            return answer[name]
    raise KeyError(names)


def _count_free(smi: Any, handle: Any) -> int:
    kind = smi.AmdSmiMemoryType.VRAM
    return int(smi.amdsmi_get_gpu_memory_total(handle, kind)) - int(smi.amdsmi_get_gpu_memory_usage(handle, kind))


def _compute_energy(smi: Any, handle: Any) -> float:
    """Return joules: the accumulator counts in units of so many microjoules."""
    answer = smi.amdsmi_get_energy_count(handle)
    return float(_take(answer, "energy_accumulator", "power")) * float(answer["counter_resolution"]) * _MICRO


def _list_amd_processes(smi: Any, handle: Any) -> list[tuple[int, int | None]]:
    found = smi.amdsmi_get_gpu_process_list(handle)
    used = ((process, process.get("memory_usage", {}).get("vram_mem", process.get("mem"))) for process in found)
    return [(int(process["pid"]), taken if isinstance(taken, int) else None) for process, taken in used]


def _count_amd_throttled(smi: Any, handle: Any) -> dict[str, float]:
    """Return samples in which a limit held the device back, and all samples. The call takes a tenth of a second."""
    answer = smi.amdsmi_get_violation_status(handle)
    names = {"all": "acc_counter", "power": "acc_ppt_pwr", "thermal": "acc_socket_thrm"}
    counts = {reason: answer[name] for reason, name in names.items() if isinstance(answer.get(name), int)}
    known = {reason: float(count) for reason, count in counts.items() if count < _UNSUPPORTED}
    if "all" not in known:
        raise KeyError("acc_counter")
    return known


_AMD_ANSWERS: dict[Question, Callable[[Any, Any], Any]] = {
    "name": lambda smi, handle: smi.amdsmi_get_gpu_asic_info(handle)["market_name"],
    "free_bytes": _count_free,
    "energy_j": _compute_energy,
    "processes": _list_amd_processes,
    "throttled": _count_amd_throttled,
    "sm_clock_mhz": lambda smi, handle: _take(
        smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.GFX), "clk", "cur_clk"
    ),
    "memory_clock_mhz": lambda smi, handle: _take(
        smi.amdsmi_get_clock_info(handle, smi.AmdSmiClkType.MEM), "clk", "cur_clk"
    ),
    "power_cap_w": lambda smi, handle: smi.amdsmi_get_power_cap_info(handle)["power_cap"] * _MICRO,
    "temperature_c": lambda smi, handle: smi.amdsmi_get_temp_metric(
        handle, smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
    ),
}


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
