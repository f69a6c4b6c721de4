"""Monitors that run during the measurement window. They record the background load on a rank's node, and clock, power,
temperature and other processes of the rank's device.

Background load is the CPU time of processes outside of the run between two readings of the kernel's counters. The run's
processes are all its ranks on this machine, their descendants and their ancestors. Several nodes of a run may share one
machine, for example in tests. The ranks of all these nodes then belong to the run's processes. Kernel threads are never
background load.

The device monitoring follows the manuals of NVML and AMD SMI. It has not been tested on a GPU yet.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from bench.core.processes import read_stat
from bench.core.quantities import BUSY_SHARE, compute_background_load, explain_busy_node
from bench.core.record import DeviceUse, NodeLoad
from bench.measure import devices
from bench.measure.control_group import read_throttled_s
from bench.measure.failures import NotQuiet

if TYPE_CHECKING:
    from bench.measure.peers import Peers  # imports torch, which a command does not need

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_RESOURCES = ("cpu", "memory", "io")
# Process id of the parent of all kernel threads.
_KERNEL_THREADS = 2


class ProcessLocation(NamedTuple):
    """Location of a rank's process: machine, process id namespace, session and CPU cores.

    Ranks with the same `kernel` run on the same machine.
    """

    kernel: str  # boot id of the machine
    processes: int  # inode of the process id namespace
    session: int  # session id; each rank leads its own session
    cores: tuple[int, ...]  # cores that the rank may use

    @classmethod
    def of_this_process(cls) -> "ProcessLocation":
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = Path("/proc/self/ns/pid").stat().st_ino
        return cls(kernel, space, os.getsid(0), tuple(sorted(os.sched_getaffinity(0))))


@dataclass(frozen=True)
class LoadReading:
    """Reading of the kernel's load counters at one point in time."""

    at: float  # seconds of the monotonic clock
    cores: int  # number of cores that are counted
    counts_s: dict[str, float]
    """Counters in seconds, by name. `idle`, `used` and `stolen` are CPU times summed over the cores of the run. During
    `used`, processes ran on the cores. During `stolen`, the hypervisor gave the cores to other virtual machines.

    `own` is the CPU time of the run's processes and of kernel threads. It is missing if not all processes of the run
    are visible. `cpu`, `memory` and `io` are the times during which at least one task waited for that resource.
    `throttled` is the time for which CPU quotas throttled the run. These four are missing if the kernel does not count
    them.
    """


class HostMonitor:
    """Sampler of the load counters of this rank's machine."""

    def __init__(self, ranks: Collection[ProcessLocation], root: Path = Path("/")) -> None:
        """Prepare the sampling of load counters for the cores of this machine that the run uses. `ranks` are the
        locations of all ranks of the run. `root` is the root folder of the file system; tests replace it."""
        self._root, here = root, ProcessLocation.of_this_process()
        near = [rank for rank in ranks if rank.kernel == here.kernel]
        self._visible = all(rank.processes == here.processes for rank in near)
        self._sessions = {rank.session for rank in near}
        self._cores = {core for rank in near for core in rank.cores}

    def sample(self) -> LoadReading | None:
        """Return the current load counters; None on a system without them. The call takes a few milliseconds."""
        counts = dict.fromkeys(("idle", "used", "stolen"), 0.0)
        try:
            cores = list(_read_cores(self._root, self._cores))
            if self._visible:
                counts["own"] = _compute_own_s(_read_processes(self._root), self._sessions)
        except (OSError, ValueError):
            return None
        if cores:
            for name, times in zip(("idle", "used", "stolen"), zip(*cores, strict=True), strict=True):
                counts[name] = sum(times)
        for name in _RESOURCES:
            with contextlib.suppress(OSError, IndexError):
                some = (self._root / "proc/pressure" / name).read_text().splitlines()[0]
                counts[name] = int(some.rpartition("total=")[2]) / 1e6
        if (throttled_s := read_throttled_s(self._root)) is not None:
            counts["throttled"] = throttled_s
        return LoadReading(time.monotonic(), len(cores), counts)


def compute_load(node: int, before: LoadReading | None, after: LoadReading | None) -> NodeLoad | None:
    """Return the load of a node between two readings; None if a reading is missing."""
    if before is None or after is None or after.at <= before.at:
        return None
    seconds = after.at - before.at
    passed = {name: count - before.counts_s[name] for name, count in after.counts_s.items() if name in before.counts_s}
    others = stolen = None
    if passed["idle"] + passed["used"] + passed["stolen"] > 0:  # in a sandbox, all counters may be 0
        capacity = seconds * after.cores
        stolen = passed["stolen"] / capacity
        others = max(0.0, passed["used"] - passed["own"]) / capacity if "own" in passed else None
    pressure = {f"{name}_pressure_share": passed[name] / seconds for name in _RESOURCES if name in passed}
    held = passed.get("throttled")
    return NodeLoad(node=node, others_share=others, stolen_share=stolen, throttled_s=held, **pressure)


class CommandMonitor:
    """Monitor of the background load on this machine from the start of a command until the command starts its first
    run."""

    def __init__(self, root: Path = Path("/")) -> None:
        """Start monitoring. The command's own processes do not count as background load. `root` is the root folder of
        the file system; tests replace it."""
        self._host = HostMonitor([ProcessLocation.of_this_process()._replace(session=os.getpid())], root)
        self._began = self._host.sample()

    def explain_busy(self) -> str:
        """Return the reason why the machine was busy between the start of the command and this call, as text. The text
        is empty if the machine was not busy, or if its load is unknown."""
        load = compute_load(0, self._began, reading := self._host.sample())
        if load is None or self._began is None or reading is None:
            return ""
        # I/O pressure is not background load here, because the command itself waits for its files.
        load = load.model_copy(update={"io_pressure_share": None})
        return explain_busy_node(load, reading.at - self._began.at)


def _read_cores(root: Path, cores: Collection[int]) -> Iterator[tuple[float, float, float]]:
    """Yield the seconds (idle, used by processes, stolen by other guests of the hypervisor) of each core in `cores`.

    Time in interrupts is not counted, because the run's own network traffic causes interrupts too. The time of virtual
    machines that run on this host is included in the time of processes.
    """
    for line in (root / "proc/stat").read_text().splitlines():
        name, *counts = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, idle, waiting, _, _, stolen = (int(count) / _TICKS_PER_S for count in counts[:8])
            yield idle + waiting, user + nice + system, stolen


class _Process(NamedTuple):
    parent: int
    session: int
    own_s: float
    children_s: float  # of children that have ended and were waited for


def _read_processes(root: Path) -> dict[int, _Process]:
    """Return all visible processes by process id."""
    found = {}
    for folder in (root / "proc").iterdir():
        if folder.name.isdigit() and (fields := read_stat(folder.name, root)):
            user, system, ended_user, ended_system = (int(ticks) / _TICKS_PER_S for ticks in fields[11:15])
            # Fields of proc(5): parent, session, and times of the process and of its reaped children.
            process = _Process(int(fields[1]), int(fields[3]), user + system, ended_user + ended_system)
            found[int(folder.name)] = process
    return found


def _compute_own_s(processes: dict[int, _Process], sessions: Collection[int]) -> float:
    """Return the total CPU seconds of the run's processes and of kernel threads so far. The run's processes are those
    whose session id is in `sessions`, their descendants and their ancestors."""
    # Ancestors end at the kernel (0) or at init (1).
    started_by_run: dict[int, bool] = {0: False, 1: False}

    def is_own(number: int) -> bool:
        """Return True if the process with id `number` is in one of the `sessions`, or descends from such a process."""
        if number not in started_by_run:
            process = processes.get(number)
            # A process id that is reused during this reading could lead to a cycle of parents.
            started_by_run[number] = False
            if process:
                started_by_run[number] = process.session in sessions or is_own(process.parent)
        return started_by_run[number]

    ancestors: set[int] = set()
    for number in sessions:
        while number in processes and number not in ancestors:
            ancestors.add(number)
            number = processes[number].parent
    total = 0.0
    for number, process in processes.items():
        if is_own(number):
            total += process.own_s + process.children_s
        elif number in ancestors or _KERNEL_THREADS in (number, process.parent):
            total += process.own_s
    return total


def compute_shares(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the fraction of time for which a device was throttled between two readings of its counters, by reason. The
    growth of the counter `all` is the elapsed time (or the number of all samples). The fraction of a reason is the
    growth of its counter, divided by the growth of `all`. The result is empty if `all` has not grown."""
    passed = after.get("all", 0.0) - before.get("all", 0.0)
    if passed <= 0:
        return {}
    both = (name for name in after if name in before and name != "all")
    return {name: max(0.0, after[name] - before[name]) / passed for name in both}


class DeviceMonitor:
    """Monitor of a device during the measurement window. Between two blocks of steps it samples the clock and the
    temperature, which takes about a millisecond. No step time includes a sample."""

    def __init__(self, rank: int, uuid: str, own: Collection[int]) -> None:
        """Create a monitor for the device `uuid`. `own` are the process ids of the run's ranks on this machine."""
        self._rank, self._uuid, self._own = rank, uuid, own
        self._clocks: list[float] = []
        self._temperatures: list[float] = []
        self._processes = 0
        self._bytes: list[int] = []

    def open(self) -> None:
        """Start monitoring at the beginning of the window."""
        self._throttled = devices.query(self._uuid, "throttled") or {}
        self._energy, self._at = devices.query(self._uuid, "energy_j"), time.perf_counter()
        self._sample_background()

    def sample(self) -> None:
        """Record the current clock and temperature of the device. Call this between two blocks of steps, so that no
        step time includes it."""
        for question, values in (("sm_clock_mhz", self._clocks), ("temperature_c", self._temperatures)):
            if (value := devices.query(self._uuid, question)) is not None:  # type: ignore[arg-type]
                values.append(value)

    def close(self) -> "Surrounded":
        """Return the use of the device and its energy since `open`."""
        closed, seconds = devices.query(self._uuid, "energy_j"), time.perf_counter() - self._at
        energy = closed - self._energy if closed is not None and self._energy is not None else None
        self._sample_background()
        shares = compute_shares(self._throttled, devices.query(self._uuid, "throttled") or {})
        use = DeviceUse(
            rank=self._rank,
            uuid=self._uuid,
            clock_mhz=statistics.median(self._clocks) if self._clocks else None,
            power_w=energy / seconds if energy is not None and seconds > 0 else None,
            temperature_c=max(self._temperatures, default=None),
            power_throttled_s=shares["power"] * seconds if "power" in shares else None,
            thermal_throttled_s=shares["thermal"] * seconds if "thermal" in shares else None,
            other_processes=self._processes,
            other_bytes=max(self._bytes, default=None),
        )
        return Surrounded(use=use, energy_j=energy, energy_s=None if energy is None else seconds)

    def _sample_background(self) -> None:
        processes, used_bytes = devices.find_background_use(self._uuid, self._own)
        self._processes = max(self._processes, processes or 0)
        self._bytes += [used_bytes] if used_bytes is not None else []


_SAMPLE_S = 1.0


@dataclass
class Surrounded:
    """Surroundings of a rank during its window of timed steps: background load on its node, and use of its device."""

    load: NodeLoad | None = None  # load of its node; only on one rank of each node
    use: DeviceUse | None = None
    energy_j: float | None = None
    energy_s: float | None = None  # between the two readings of the energy


class Surroundings:
    """Monitors of a rank's node and of its device."""

    def __init__(self, rank: int, node: int, uuid: str | None, peers: "Peers", *, watches_node: bool) -> None:
        """Create the monitors of this rank's node and device. `uuid` is the driver's name of the device; None on a CPU.
        `peers` connects this rank with all ranks of the run.

        `watches_node` is true for one rank of each node, which monitors the load of the node.
        """
        self._node, self._uuid = node, uuid
        ranks: list[ProcessLocation] = peers.broadcast(peers.gather(ProcessLocation.of_this_process()))
        here = ProcessLocation.of_this_process()
        self._own = {location.session for location in ranks if location[:2] == here[:2]} | {os.getpid()}
        self._host = HostMonitor(ranks) if watches_node else None
        self._opened: LoadReading | None = None
        self._device = DeviceMonitor(rank, uuid, self._own) if uuid else None

    def wait_until_quiet(self, within_s: float, peers: "Peers", still_here: Callable[[], None]) -> None:
        """Wait until the background load of every node is at most BUSY_SHARE. A run with a higher background load is
        flagged `busy`. The ranks sleep while they wait.

        Raise NotQuiet if the load of a node is still higher after `within_s` seconds. The load is sampled repeatedly.
        `still_here` is called before each sample of the load, to show that the rank is alive.
        """
        until = time.monotonic() + within_s
        while True:
            still_here()
            before = self._sample()
            time.sleep(_SAMPLE_S)
            loads = [load for load in peers.gather(compute_load(self._node, before, self._sample())) if load]
            shares = [(load.node, compute_background_load(load) or 0.0) for load in loads]
            noisy = (f"background load takes {100 * share:.0f} % of node {node}" for node, share in shares
                     if share > BUSY_SHARE)  # fmt: skip
            why = next(noisy, "")
            why, is_over = peers.broadcast((why, time.monotonic() >= until))
            if not why:
                return
            if is_over:
                raise NotQuiet(f"{why}, and this did not end within {within_s:g} s")

    def open(self) -> None:
        """Start monitoring at the beginning of the window."""
        self._opened = self._sample()
        if self._device:
            self._device.open()

    def sample(self) -> None:
        """Record the current clock and temperature of the rank's device, if it has a device. Call this between two
        blocks of steps in the measurement window."""
        if self._device:
            self._device.sample()

    def close(self) -> Surrounded:
        """Return the background load and device use since the window began."""
        load = compute_load(self._node, self._opened, self._sample())
        seen = self._device.close() if self._device else Surrounded()
        seen.load = load
        return seen

    def read_background_bytes(self) -> int | None:
        """Return the memory in bytes of other processes on this rank's device; None on a CPU or if unknown."""
        return devices.find_background_use(self._uuid, self._own)[1] if self._uuid else None

    def _sample(self) -> LoadReading | None:
        return self._host.sample() if self._host else None
