"""AMD's devices by the library of their driver, amdsmi, which comes with ROCm.

Written by AMD SMI's manual (https://rocm.docs.amd.com/projects/amdsmi), and not tried on a device yet. Names of fields
changed between its versions; where there are several, all are looked for.
"""

from collections.abc import Callable, Mapping
from typing import Any

from bench.measure.device_driver import Question

_UNSUPPORTED = 2**64 - 1
_MICRO = 1e-6


class AmdDriver:
    """See `bench.measure.device_driver`. A device's own name is its PCI address, as torch tells it too."""

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
            answer = _ANSWERS[question](smi, handle)
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


def _list_processes(smi: Any, handle: Any) -> list[tuple[int, int | None]]:
    found = smi.amdsmi_get_gpu_process_list(handle)
    used = ((process, process.get("memory_usage", {}).get("vram_mem", process.get("mem"))) for process in found)
    return [(int(process["pid"]), taken if isinstance(taken, int) else None) for process, taken in used]


def _count_throttled(smi: Any, handle: Any) -> dict[str, float]:
    """Return samples in which a limit held the device back, and all samples. The call takes a tenth of a second."""
    answer = smi.amdsmi_get_violation_status(handle)
    names = {"all": "acc_counter", "power": "acc_ppt_pwr", "thermal": "acc_socket_thrm"}
    counts = {reason: answer[name] for reason, name in names.items() if isinstance(answer.get(name), int)}
    known = {reason: float(count) for reason, count in counts.items() if count < _UNSUPPORTED}
    if "all" not in known:
        raise KeyError("acc_counter")
    return known


_ANSWERS: dict[Question, Callable[[Any, Any], Any]] = {
    "name": lambda smi, handle: smi.amdsmi_get_gpu_asic_info(handle)["market_name"],
    "free_bytes": _count_free,
    "energy_j": _compute_energy,
    "processes": _list_processes,
    "throttled": _count_throttled,
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
