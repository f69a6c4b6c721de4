"""State of this machine's GPUs as reported by the driver's library: names, clocks, power, energy and processes.

The code for AMD follows AMD SMI's manual (https://rocm.docs.amd.com/projects/amdsmi) and has not been tested on an AMD
device yet. Some fields were renamed between versions of AMD SMI. The code tries all known names.
"""

import functools
import importlib
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

Question = Literal[
    "name",
    "free_bytes",  # free memory of the device
    "energy_j",  # energy used since the driver was loaded
    "processes",  # list of (process id, bytes or None) of the processes that compute on the device
    "throttled",  # counters by reason (power, thermal) that grow while the device is throttled; `all` always grows
    "sm_clock_mhz",
    "memory_clock_mhz",
    "power_cap_w",
    "temperature_c",
    "throttle_reasons",  # bit mask as defined by the manufacturer
    "capability",  # NVIDIA's architecture, e.g. "9.0"
    "driver_version",
]
STATE: tuple[Question, ...] = (
    "name", "sm_clock_mhz", "memory_clock_mhz", "power_cap_w", "temperature_c", "throttle_reasons",
)  # fmt: skip
"""Properties of each device that a record contains."""


_OF_WHOLE_DEVICE: tuple[Question, ...] = (
    "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "throttle_reasons", "throttled",
)  # fmt: skip
"""Properties that are read from the whole device if the device in question is a MIG slice. Energy and power cap are
shared between the slices of a device, so they stay unknown for a slice."""


class NvidiaDriver:
    """NVIDIA devices, accessed with NVML. A MIG slice of a device has its own UUID. In contrast, the clocks reported
    for a slice are the clocks of the whole device."""

    def __init__(self, nvml: Any) -> None:
        """Wrap `nvml`, the pynvml module after its initialisation."""
        self._nvml = nvml

    def count(self) -> int:
        return int(self._nvml.nvmlDeviceGetCount())

    def ask(self, device: int | str, question: Question) -> Any:
        try:
            handle = self._find_handle(device)
            if question in _OF_WHOLE_DEVICE:
                handle = self._try(self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle, handle) or handle
            return _NVML_ANSWERS[question](self._nvml, handle)
        except self._nvml.NVMLError:  # no such device, or not supported by it
            return None

    def _find_handle(self, device: int | str) -> Any:
        if isinstance(device, int):
            return self._nvml.nvmlDeviceGetHandleByIndex(device)
        # Two prefixes are tried, because `read_driver_name` gives the UUID of a MIG slice the prefix of a whole device.
        handle = self._try(self._nvml.nvmlDeviceGetHandleByUUID, device)
        return handle or self._nvml.nvmlDeviceGetHandleByUUID(device.replace("GPU-", "MIG-", 1))

    def _try(self, function: Callable[[Any], Any], argument: Any) -> Any:
        try:
            return function(argument)
        except self._nvml.NVMLError:
            return None


def _count_nvidia_throttled(nvml: Any, handle: Any) -> dict[str, float]:
    """Return the seconds for which power and thermal limits have throttled a device, by reason.

    The times are NVML's violation times, which grow while a limit throttles the device. The key `all` has the host's
    clock in seconds. The throttled fraction of the time follows from two calls: it is the growth of a reason's value,
    divided by the growth of `all`.
    """
    policies = {"power": nvml.NVML_PERF_POLICY_POWER, "thermal": nvml.NVML_PERF_POLICY_THERMAL}
    found = {"all": time.perf_counter()}
    for reason, policy in policies.items():
        try:
            found[reason] = nvml.nvmlDeviceGetViolationStatus(handle, policy).violationTime / 1e9
        except nvml.NVMLError:
            # A device may support only one of the two policies.
            continue
    if len(found) == 1:
        raise nvml.NVMLError(nvml.NVML_ERROR_NOT_SUPPORTED)
    return found


_NVML_ANSWERS: dict[Question, Callable[[Any, Any], Any]] = {
    "name": lambda nvml, handle: str(nvml.nvmlDeviceGetName(handle)),
    "free_bytes": lambda nvml, handle: int(nvml.nvmlDeviceGetMemoryInfo(handle).free),
    "energy_j": lambda nvml, handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3,
    "processes": lambda nvml, handle: [
        (process.pid, process.usedGpuMemory) for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    ],
    "throttled": _count_nvidia_throttled,
    "sm_clock_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
    "memory_clock_mhz": lambda nvml, handle: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
    "power_cap_w": lambda nvml, handle: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
    "temperature_c": lambda nvml, handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
    "throttle_reasons": lambda nvml, handle: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle),
    "driver_version": lambda nvml, handle: str(nvml.nvmlSystemGetDriverVersion()),
    "capability": lambda nvml, handle: "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle)),
}

# AMD SMI's value of a counter that a device lacks.
_UNSUPPORTED = 2**64 - 1
_MICRO = 1e-6


class AmdDriver:
    """AMD devices, accessed with amdsmi, which is part of ROCm. A device's name is its PCI address, as in torch."""

    def __init__(self, amdsmi: Any) -> None:
        """Wrap `amdsmi`, the amdsmi module after its initialisation."""
        self._amdsmi = amdsmi

    def count(self) -> int:
        return len(self._amdsmi.amdsmi_get_processor_handles())

    def ask(self, device: int | str, question: Question) -> Any:
        smi = self._amdsmi
        try:
            if isinstance(device, int):
                handle = smi.amdsmi_get_processor_handles()[device]
            else:
                handle = smi.amdsmi_get_processor_handle_from_bdf(device)
            answer = _AMD_ANSWERS[question](smi, handle)
        except (smi.AmdSmiException, AttributeError, KeyError, IndexError, TypeError, ValueError):
            # No such device, or not supported by it or by this version of the library.
            return None
        return None if answer == "N/A" else answer


def _read_field(answer: Mapping[str, Any], *names: str) -> Any:
    """Return the value of the first field of `names` that the answer contains. Raise KeyError if it contains none of
    them."""
    return answer[next((name for name in names if name in answer), names[0])]


def _count_free_bytes(smi: Any, handle: Any) -> int:
    kind = smi.AmdSmiMemoryType.VRAM
    return int(smi.amdsmi_get_gpu_memory_total(handle, kind)) - int(smi.amdsmi_get_gpu_memory_usage(handle, kind))


def _compute_energy_j(smi: Any, handle: Any) -> float:
    # `counter_resolution` is in microjoules per count.
    answer = smi.amdsmi_get_energy_count(handle)
    return float(_read_field(answer, "energy_accumulator", "power")) * float(answer["counter_resolution"]) * _MICRO


def _list_amd_processes(smi: Any, handle: Any) -> list[tuple[int, int | None]]:
    found = smi.amdsmi_get_gpu_process_list(handle)
    used = ((process, process.get("memory_usage", {}).get("vram_mem", process.get("mem"))) for process in found)
    return [(int(process["pid"]), count if isinstance(count, int) else None) for process, count in used]


def _count_amd_throttled(smi: Any, handle: Any) -> dict[str, float]:
    """Return the number of the driver's samples in which a limit throttled the device, by reason. The key `all` is the
    number of all samples.

    The call takes 0.1 s.
    """
    answer = smi.amdsmi_get_violation_status(handle)
    names = {"all": "acc_counter", "power": "acc_ppt_pwr", "thermal": "acc_socket_thrm"}
    counts = {reason: answer[name] for reason, name in names.items() if isinstance(answer.get(name), int)}
    known = {reason: float(count) for reason, count in counts.items() if count < _UNSUPPORTED}
    if "all" not in known:
        raise KeyError("acc_counter")
    return known


def _read_amd_clock(smi: Any, handle: Any, kind: str) -> Any:
    return _read_field(smi.amdsmi_get_clock_info(handle, getattr(smi.AmdSmiClkType, kind)), "clk", "cur_clk")


_AMD_ANSWERS: dict[Question, Callable[[Any, Any], Any]] = {
    "name": lambda smi, handle: smi.amdsmi_get_gpu_asic_info(handle)["market_name"],
    "driver_version": lambda smi, handle: str(smi.amdsmi_get_gpu_driver_info(handle)["driver_version"]),
    "free_bytes": _count_free_bytes,
    "energy_j": _compute_energy_j,
    "processes": _list_amd_processes,
    "throttled": _count_amd_throttled,
    "sm_clock_mhz": functools.partial(_read_amd_clock, kind="GFX"),
    "memory_clock_mhz": functools.partial(_read_amd_clock, kind="MEM"),
    "power_cap_w": lambda smi, handle: smi.amdsmi_get_power_cap_info(handle)["power_cap"] * _MICRO,
    "temperature_c": lambda smi, handle: smi.amdsmi_get_temp_metric(
        handle, smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
    ),
}


@functools.cache
def _load_driver() -> "NvidiaDriver | AmdDriver | None":
    """Return the driver of the first manufacturer that has a device in this machine; None if there is no device."""
    makers = (("pynvml", "nvmlInit", NvidiaDriver), ("amdsmi", "amdsmi_init", AmdDriver))
    for module, initialise, kind in makers:
        try:
            library = importlib.import_module(module)
            getattr(library, initialise)()
            driver = kind(library)
            if driver.count():
                return driver
        except Exception:  # no package, no driver, or no permission
            continue
    return None


def query(device: int | str, question: Question) -> Any:
    """Return the value of a property of a device, such as its name or its energy.

    None if there is no such device, if the device does not report the property, or if no driver was found. `device` is
    the driver's device number or the device's own name: the UUID for NVIDIA, the PCI address for AMD.
    """
    driver = _load_driver()
    return driver.ask(device, question) if driver else None


def count_devices() -> int:
    """Return the number of GPUs of this machine; 0 if no driver was found."""
    driver = _load_driver()
    return driver.count() if driver else 0


def find_background_use(device: int | str, own: Collection[int]) -> tuple[int | None, int | None]:
    """Return how many processes outside of the run use a device, and the bytes of memory that these processes use. A
    value is None if it is unknown. `own` are the process ids of the run.

    In a container, the driver may report the host's process ids, which differ from the ids in `own`. If no process on
    the device is in `own`, one of the processes is assumed to be the run's rank. All other processes are background
    load. Their memory is then unknown, because any of the processes may be the rank. Exception: if the device has only
    one process, there is no background load, and the memory is 0.
    """
    found: list[tuple[int, int | None]] | None = query(device, "processes")
    if found is None:
        return None, None
    if any(number in own for number, _ in found) or not found:
        used = [count for number, count in found if number not in own]
        return len(used), None if None in used else sum(count for count in used if count is not None)
    return len(found) - 1, 0 if len(found) == 1 else None


def read_states() -> list[dict[str, Any]]:
    """Return the current name, clocks (MHz), power cap (W), temperature (°C) and throttle reasons of every device."""
    return [{question: query(number, question) for question in STATE} for number in range(count_devices())]
