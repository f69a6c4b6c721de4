"""Tests of queries to GPU drivers. They need no GPU, because fake driver libraries answer the queries. The fake
libraries follow the vendors' manuals.

NVIDIA: https://docs.nvidia.com/deploy/nvml-api. AMD: https://rocm.docs.amd.com/projects/amdsmi.
"""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.measure import devices, environment
from bench.measure.devices import AmdDriver, NvidiaDriver, Question
from bench.measure.surroundings import DeviceMonitor, compute_shares


class NvmlError(Exception):
    pass


def refuse(*_: Any) -> Any:
    raise NvmlError


class Nvml:
    """Fake NVML library with a card, GPU-1, and a MIG slice of this card, MIG-2. For the slice, it reports only name
    and memory."""

    NVMLError = NvmlError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_PERF_POLICY_POWER, NVML_PERF_POLICY_THERMAL = 0, 1
    NVML_ERROR_NOT_SUPPORTED = 3

    def __init__(self) -> None:
        self.violation_ns = {0: 2e9, 1: 0.0}

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, number: int) -> str:
        return "card" if number == 0 else refuse()

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return {"GPU-1": "card", "MIG-2": "slice"}.get(uuid) or refuse()

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        return "card" if handle == "slice" else refuse()

    def nvmlDeviceGetName(self, handle: str) -> str:
        return {"card": "NVIDIA A100-SXM4-40GB", "slice": "NVIDIA A100-SXM4-40GB MIG 1g.5gb"}[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        return SimpleNamespace(free={"card": 40, "slice": 5}[handle] * 10**9)

    def nvmlDeviceGetClockInfo(self, handle: str, _: int) -> int:
        return 1410 if handle == "card" else refuse()

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        return 5000 if handle == "card" else refuse()

    def nvmlDeviceGetViolationStatus(self, handle: str, policy: int) -> SimpleNamespace:
        return SimpleNamespace(violationTime=self.violation_ns[policy]) if handle == "card" else refuse()

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=7, usedGpuMemory=3), SimpleNamespace(pid=9, usedGpuMemory=None)]


@pytest.mark.parametrize(
    ("name", "question", "answer"),
    [
        (0, "name", "NVIDIA A100-SXM4-40GB"),
        ("GPU-1", "name", "NVIDIA A100-SXM4-40GB"),
        ("GPU-2", "name", "NVIDIA A100-SXM4-40GB MIG 1g.5gb"),  # torch reports the UUID of a slice with this prefix
        ("MIG-2", "free_bytes", 5 * 10**9),
        ("MIG-2", "sm_clock_mhz", 1410),  # clock of the whole card
        ("MIG-2", "energy_j", None),  # energy of the card, which includes other slices
        ("GPU-1", "energy_j", 5.0),
        ("GPU-3", "name", None),
        (1, "name", None),
    ],
)
def test_mig_slice_has_own_memory_and_shares_counters_of_its_card(
    name: int | str, question: Question, answer: Any
) -> None:
    assert NvidiaDriver(Nvml()).ask(name, question) == answer


class AmdError(Exception):
    pass


class AmdSmi:
    """Fake amdsmi of ROCm 6.4 with one MI300X. In half of the driver's samples so far, the card was throttled because
    of its power cap."""

    AmdSmiException = AmdError
    AmdSmiMemoryType = SimpleNamespace(VRAM=0)
    AmdSmiClkType = SimpleNamespace(GFX=1, MEM=4)
    AmdSmiTemperatureType, AmdSmiTemperatureMetric = SimpleNamespace(HOTSPOT=1), SimpleNamespace(CURRENT=0)

    def amdsmi_get_processor_handles(self) -> list[str]:
        return ["handle"]

    def amdsmi_get_processor_handle_from_bdf(self, address: str) -> str:
        if address != "0000:c1:00.0":
            raise AmdError
        return "handle"

    def amdsmi_get_gpu_asic_info(self, _: str) -> dict[str, Any]:
        return {"market_name": "AMD Instinct MI300X"}

    def amdsmi_get_gpu_driver_info(self, _: str) -> dict[str, Any]:
        return {"driver_name": "amdgpu", "driver_version": "6.12.12"}

    def amdsmi_get_gpu_memory_total(self, _: str, kind: int) -> int:
        return 192 * 2**30

    def amdsmi_get_gpu_memory_usage(self, _: str, kind: int) -> int:
        return 2 * 2**30

    def amdsmi_get_energy_count(self, _: str) -> dict[str, Any]:
        return {"energy_accumulator": 2_000_000, "counter_resolution": 15.3, "timestamp": 1}

    def amdsmi_get_clock_info(self, _: str, kind: int) -> dict[str, Any]:
        return {"clk": 2100, "max_clk": 2100} if kind == 1 else {"cur_clk": 1300}

    def amdsmi_get_power_cap_info(self, _: str) -> dict[str, int]:
        return {"power_cap": 750_000_000}

    def amdsmi_get_temp_metric(self, *_: Any) -> Any:
        return "N/A"

    def amdsmi_get_violation_status(self, _: str) -> dict[str, Any]:
        return {"acc_counter": 1000, "acc_ppt_pwr": 500, "acc_socket_thrm": 2**64 - 1}

    def amdsmi_get_gpu_process_list(self, _: str) -> list[dict[str, Any]]:
        return [{"pid": 7, "memory_usage": {"vram_mem": 4}}, {"pid": 8, "mem": "N/A"}]


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("name", "AMD Instinct MI300X"),
        ("free_bytes", 190 * 2**30),
        ("energy_j", pytest.approx(30.6)),
        ("sm_clock_mhz", 2100),
        ("memory_clock_mhz", 1300),
        ("power_cap_w", 750),
        ("temperature_c", None),
        ("throttled", {"all": 1000, "power": 500}),
        ("processes", [(7, 4), (8, None)]),
        ("throttle_reasons", None),  # AMD's codes have other meanings than NVIDIA's
    ],
)
def test_amd_devices_give_the_same_facts(question: Question, answer: Any) -> None:
    driver = AmdDriver(AmdSmi())
    assert driver.ask("0000:c1:00.0", question) == driver.ask(0, question) == answer
    assert driver.ask("0000:c2:00.0", question) is driver.ask(1, question) is None
    assert (driver.count(), driver.ask(0, "driver_version")) == (1, "6.12.12")


def test_throttled_time_is_the_share_of_counts_between_two_samples() -> None:
    """NVIDIA's counter has the seconds of throttling. Its increase is divided by the elapsed seconds. AMD's counter has
    the number of samples in which the card was throttled. Its increase is divided by the number of all samples in this
    time."""
    nvidia = compute_shares({"all": 100.0, "power": 7.0}, {"all": 120.0, "power": 17.0, "thermal": 1.0})
    amd = compute_shares({"all": 1000, "power": 10}, {"all": 3000, "power": 1010})
    assert nvidia == amd == {"power": 0.5}
    assert compute_shares({"all": 1.0, "power": 0.0}, {"all": 1.0, "power": 0.0}) == compute_shares({}, {}) == {}


@pytest.fixture
def one_amd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_load_driver", lambda: AmdDriver(AmdSmi()))


@pytest.mark.usefixtures("one_amd")
def test_device_watch_uses_the_available_driver() -> None:
    watch = DeviceMonitor(0, "0000:c1:00.0", {7})
    watch.open()
    watch.sample()
    seen = watch.close()
    assert seen.use and (seen.use.clock_mhz, seen.use.other_processes, seen.use.other_bytes) == (2100, 1, None)
    assert seen.energy_j == 0.0 and seen.energy_s and seen.use.power_throttled_s is None, "no samples between two looks"
    assert devices.read_states()[0]["power_cap_w"] == 750


@pytest.mark.usefixtures("one_amd")
def test_torch_for_amd_is_recognised_by_its_hip_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_read_torch_constant", {"hip": "6.4.43483"}.get)
    for name in environment.VISIBLE:
        monkeypatch.delenv(name, raising=False)
    assert (environment.find_device_kind(), environment.name_collectives()) == ("cuda", "rccl")
    found = environment.classify("cuda", 1)
    assert (found.device, found.versions["hip"], found.versions["cuda"]) == ("AMD Instinct MI300X", "6.4.43483", None)
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "")
    assert environment.find_device_kind() == "cpu", "hidden"


@pytest.mark.parametrize(
    ("hip", "name"), [(None, "GPU-5f2a"), ("6.4", "0000:c1:00.0")]
)  # fmt: skip
def test_device_has_the_name_that_its_driver_reports(
    hip: str | None, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(uuid="5f2a", pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert environment.read_driver_name(torch.device("cuda", 0)) == name
    assert environment.read_driver_name(torch.device("cpu")) is None
