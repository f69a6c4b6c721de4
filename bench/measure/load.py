"""What others take of a node while a run is timed, as the kernel counts it between two readings.

Others are all processes that are not of the run: its ranks on this kernel, whatever they have started, and the
processes that have started them are its own, those of its other nodes too where several share one machine. What the
kernel does for itself is nobody's.
"""

import os
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench.measure.control_group import throttled_s
from bench.record import NodeLoad

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
