"""What happens around a rank while it is timed: background load on its node, and the use of its own device.

Background load is what processes take that are not of the run, as the kernel counts it between two readings. The run's
own are its ranks on this kernel, whatever they have started, and the processes that have started them; those of its
other nodes too where several share one machine. What the kernel does for itself is nobody's.

The use of a device is written by the manuals of NVML and of AMD SMI, and not tried on a GPU yet.
"""

import os
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.core.quantities import BUSY_SHARE, compute_background_load
from bench.core.record import DeviceUse, NodeLoad
from bench.measure import devices
from bench.measure.control_group import throttled_s
from bench.measure.failures import Refused
from bench.measure.peers import Peers

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_RESOURCES = ("cpu", "memory", "io")
_KERNEL_THREADS = 2  # the parent of all of them


class Whereabouts(NamedTuple):
    """Where a rank runs, so that those on its machine know it."""

    kernel: str  # one boot of one machine
    processes: int  # the name space of process numbers
    session: int  # of processes; a rank leads its own
    cores: tuple[int, ...]  # that it may use

    @classmethod
    def of_this_process(cls) -> "Whereabouts":
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = Path("/proc/self/ns/pid").stat().st_ino
        return cls(kernel, space, os.getsid(0), tuple(sorted(os.sched_getaffinity(0))))


@dataclass(frozen=True)
class LoadReading:
    """What the kernel has counted up to a moment, in seconds."""

    at: float  # monotonic
    cores: int  # those that are looked at
    idle_s: float
    used_s: float  # by processes, on these cores
    stolen_s: float
    own_s: float | None  # by processes of the run and of the kernel; None where they cannot all be seen
    pressure_s: dict[str, float]  # by resource: some task waited for it
    throttled_s: float | None


class _Process(NamedTuple):
    parent: int
    session: int
    own_s: float
    children_s: float  # of those that have ended and were waited for


class Monitor:
    """Reads the load of the machine that this rank runs on; `ranks` is where all of the run are."""

    def __init__(self, ranks: Collection[Whereabouts], root: Path = Path("/")) -> None:
        self._root, here = root, Whereabouts.of_this_process()
        near = [rank for rank in ranks if rank.kernel == here.kernel]
        self._visible = all(rank.processes == here.processes for rank in near)
        self._sessions = {rank.session for rank in near}
        self._cores = {core for rank in near for core in rank.cores}

    def read(self) -> LoadReading | None:
        """Return what is counted up to now: some milliseconds' work; None on a system that does not tell."""
        try:
            cores = list(_processors(self._root, self._cores))
            own = _own_s(_processes(self._root), self._sessions) if self._visible else None
        except (OSError, ValueError):
            return None
        idle, used, stolen = (sum(times) for times in zip(*cores, strict=True)) if cores else (0.0, 0.0, 0.0)
        pressure = {name: seconds for name in _RESOURCES if (seconds := _pressure_s(self._root, name)) is not None}
        held = throttled_s(self._root)
        return LoadReading(time.monotonic(), len(cores), idle, used, stolen, own, pressure, held)


def between(node: int, before: LoadReading | None, after: LoadReading | None) -> NodeLoad | None:
    """Return what others took between two readings; None where there are none."""
    if before is None or after is None or after.at <= before.at:
        return None
    seconds = after.at - before.at
    counted = after.idle_s + after.used_s + after.stolen_s - before.idle_s - before.used_s - before.stolen_s
    capacity = seconds * after.cores if counted > 0 else None  # a sandbox may show counters that stand still
    others = None
    if capacity and before.own_s is not None and after.own_s is not None:
        others = max(0.0, after.used_s - before.used_s - (after.own_s - before.own_s)) / capacity
    pressure = {
        f"{name}_pressure_share": (after.pressure_s[name] - before.pressure_s[name]) / seconds
        for name in _RESOURCES
        if name in before.pressure_s and name in after.pressure_s
    }
    held = None
    if before.throttled_s is not None and after.throttled_s is not None:
        held = after.throttled_s - before.throttled_s
    return NodeLoad(
        node=node,
        others_share=others,
        stolen_share=(after.stolen_s - before.stolen_s) / capacity if capacity else None,
        throttled_s=held,
        **pressure,
    )


def _processors(root: Path, cores: Collection[int]) -> Iterator[tuple[float, float, float]]:
    """Yield (idle, used by processes, stolen) of each of `cores` in seconds. Interrupts are left out: a run's own
    network causes them too. A guest's time is in that of the processes."""
    for line in (root / "proc/stat").read_text().splitlines():
        name, *counts = line.split()
        if name[:3] == "cpu" and name[3:].isdigit() and int(name[3:]) in cores:
            user, nice, system, idle, waiting, _, _, stolen = (int(count) / _TICKS_PER_S for count in counts[:8])
            yield idle + waiting, user + nice + system, stolen


def _processes(root: Path) -> dict[int, _Process]:
    """Return every process that can be seen, by its number."""
    found = {}
    for folder in (root / "proc").iterdir():
        if folder.name.isdigit():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # it is gone meanwhile
            user, system, ended_user, ended_system = (int(ticks) / _TICKS_PER_S for ticks in fields[11:15])
            process = _Process(int(fields[1]), int(fields[3]), user + system, ended_user + ended_system)
            found[int(folder.name)] = process
    return found


def _own_s(processes: dict[int, _Process], sessions: Collection[int]) -> float:
    """Return the processor time of the run and of the kernel's own threads so far."""
    started_by_run: dict[int, bool] = {0: False, 1: False}

    def is_own(number: int) -> bool:
        """Whether a process is of one of the sessions, or was started by one that is."""
        if number not in started_by_run:
            process = processes.get(number)
            started_by_run[number] = False  # numbers that are given anew while this reads could make a circle
            if process:
                started_by_run[number] = process.session in sessions or is_own(process.parent)
        return started_by_run[number]

    around: set[int] = set()
    for number in sessions:
        while number in processes and number not in around:
            around.add(number)
            number = processes[number].parent
    total = 0.0
    for number, process in processes.items():
        if is_own(number):
            total += process.own_s + process.children_s
        elif number in around or _KERNEL_THREADS in (number, process.parent):
            total += process.own_s
    return total


def _pressure_s(root: Path, resource: str) -> float | None:
    """Return for how long some task has waited for a resource so far; None where the kernel does not count it."""
    try:
        some = (root / "proc/pressure" / resource).read_text().splitlines()[0]
    except (OSError, IndexError):
        return None
    return int(some.rpartition("total=")[2]) / 1e6


def compute_shares(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    """Return the share of the time between two looks in which each reason held a device back, from its counts and that
    of `all`."""
    passed = after.get("all", 0.0) - before.get("all", 0.0)
    if passed <= 0:
        return {}
    both = (name for name in after if name in before and name != "all")
    return {name: max(0.0, after[name] - before[name]) / passed for name in both}


class DeviceWatch:
    """Looks at a device between the blocks of a window: each look takes about a millisecond, off the clock."""

    def __init__(self, rank: int, uuid: str, own: Collection[int]) -> None:
        """`own` are the process numbers of the run's ranks on this machine."""
        self._rank, self._uuid, self._own = rank, uuid, own
        self._clocks: list[float] = []
        self._temperatures: list[float] = []
        self._processes = 0
        self._bytes: list[int] = []

    def open(self) -> None:
        """The window begins."""
        self._throttled = devices.count_throttled(self._uuid)
        self._energy, self._at = devices.read_energy_j(self._uuid), time.perf_counter()
        self._look_at_others()

    def look(self) -> None:
        """Between two blocks."""
        state = devices.state(self._uuid)
        self._clocks += [state["sm_clock_mhz"]] if state["sm_clock_mhz"] is not None else []
        self._temperatures += [state["temperature_c"]] if state["temperature_c"] is not None else []

    def close(self) -> tuple[DeviceUse, float | None, float | None]:
        """Return what the device did since `open`, the energy that it has used in joules, and over how many seconds."""
        closed, seconds = devices.read_energy_j(self._uuid), time.perf_counter() - self._at
        energy = closed - self._energy if closed is not None and self._energy is not None else None
        self._look_at_others()
        shares = compute_shares(self._throttled, devices.count_throttled(self._uuid))
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
        return use, energy, None if energy is None else seconds

    def _look_at_others(self) -> None:
        others = devices.others(self._uuid, self._own)
        self._processes = max(self._processes, others.processes or 0)
        self._bytes += [others.bytes] if others.bytes is not None else []


_LOOK_S = 1.0


@dataclass
class Surrounded:
    """What a rank tells of the time of its window."""

    load: NodeLoad | None = None  # of its node; told by one rank of each
    use: DeviceUse | None = None
    energy_j: float | None = None
    energy_s: float | None = None  # between the two readings that it is the difference of


class Surroundings:
    """Watches one rank's node and device."""

    def __init__(self, rank: int, node: int, uuid: str | None, peers: Peers, *, watches_node: bool) -> None:
        """`uuid` is the driver's name of the rank's device, None on a CPU; one rank of a node watches it for all."""
        self._rank, self._node, self._uuid = rank, node, uuid
        self._ranks: list[Whereabouts] = peers.broadcast(peers.gather(Whereabouts.of_this_process()))
        self._monitor = Monitor(self._ranks) if watches_node else None
        self._opened: LoadReading | None = None
        self._use = DeviceWatch(rank, uuid, self._numbers()) if uuid else None

    def wait_until_quiet(self, within_s: float, peers: Peers, still_here: Callable[[], None]) -> None:
        """Return once others take less of every node than makes a run `busy`; raise Refused where they do not within
        `within_s`. Ranks wait without computing meanwhile. `still_here` is called again and again."""
        until = time.monotonic() + within_s
        while True:
            still_here()
            before = self._read()
            time.sleep(_LOOK_S)
            seen = between(self._node, before, self._read())
            loads = [load for load in peers.gather(seen) if load is not None]
            shares = [(load.node, compute_background_load(load) or 0.0) for load in loads]
            texts = (f"others take {100 * share:.0f} % of node {node}" for node, share in shares if share > BUSY_SHARE)
            why = next(texts, "")
            why, over = peers.broadcast((why, time.monotonic() >= until))
            if not why:
                return
            if over:
                raise Refused(f"{why}, and it did not become quiet within {within_s:g} s")

    def open(self) -> None:
        """The window begins."""
        self._opened = self._read()
        if self._use:
            self._use.open()

    def look(self) -> None:
        """Between two blocks of the window."""
        if self._use:
            self._use.look()

    def close(self) -> Surrounded:
        """The window has ended; return what happened since it began."""
        seen = Surrounded(load=between(self._node, self._opened, self._read()))
        if self._use:
            seen.use, seen.energy_j, seen.energy_s = self._use.close()
        return seen

    def other_bytes(self) -> int | None:
        """Return the memory that others have on this rank's device now; None where nobody tells."""
        return devices.others(self._uuid, self._numbers()).bytes if self._uuid else None

    def _numbers(self) -> set[int]:
        """Return the process numbers of the ranks on this machine."""
        here = Whereabouts.of_this_process()
        return {rank.session for rank in self._ranks if rank[:2] == here[:2]} | {os.getpid()}

    def _read(self) -> LoadReading | None:
        return self._monitor.read() if self._monitor else None
