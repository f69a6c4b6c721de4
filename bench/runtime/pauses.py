"""Pauses of a node's processes: a suspended job, SIGSTOP, a machine that slept.

A paused supervisor finds after the pause that far more time has passed than it asked to sleep. Time
in which it was computing, or waited for a core next to other processes, is no pause: the kernel counts both.
"""

import contextlib
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

GAP_S = 2.0
"""A supervisor asks to sleep for 0.2 s; a gap shorter than this is ordinary delay."""
_RANK_S = 1.0  # a rank that was stopped for less, by a debugger that took its stacks say, was not paused
_STOPPED = frozenset("Tt")  # states of a process: by a signal, or by a debugger


class Moment(NamedTuple):
    """Seconds since the boot, sleep of the machine included, and seconds that this thread computed or waited for a
    core."""

    at: float
    active: float


class PauseTotals(NamedTuple):
    """Seconds of pauses on one node: since the start of the ranks, and those while a rank was making steps."""

    all_s: float = 0.0
    in_steps_s: float = 0.0

    def combine(self, other: "PauseTotals") -> "PauseTotals":
        """Return the longer of two nodes' pauses: a job is suspended on all its nodes at once."""
        return PauseTotals(max(self.all_s, other.all_s), max(self.in_steps_s, other.in_steps_s))


class PauseWatch:
    """Pauses of one supervisor and of its ranks, seen by looking a few times per second."""

    def __init__(self, read_moment: Callable[[], Moment] | None = None) -> None:
        self._read_moment = read_moment or _read_moment
        self._last = self._read_moment()
        self._was_in_steps = False
        self._own = PauseTotals()
        self._ranks: dict[int, PauseTotals] = {}  # by process id
        self.stopped: frozenset[int] = frozenset()  # process ids of ranks that are stopped now

    def restart(self) -> None:
        """Begin the next interval now: what this thread did since the last look was asked of it."""
        self._last = self._read_moment()

    def look(self, pids: Iterable[int], *, in_steps: bool) -> float:
        """Return the seconds for which this supervisor itself was paused since the last look, 0 for none. `pids` are
        its running ranks, `in_steps` is whether any of them makes steps."""
        last, self._last = self._last, self._read_moment()
        elapsed_s = self._last.at - last.at
        gap_s = elapsed_s - (self._last.active - last.active)
        paused_s = gap_s if gap_s > GAP_S else 0.0
        # A window whose time is over ends with the first step after a pause, perhaps before this supervisor looks.
        touched_steps, self._was_in_steps = in_steps or self._was_in_steps, in_steps
        self._own = _add(self._own, paused_s, touched_steps)
        self.stopped = frozenset(pid for pid in pids if _read_state(pid) in _STOPPED)
        for pid in () if paused_s else self.stopped:
            self._ranks[pid] = _add(self._ranks.get(pid, PauseTotals()), elapsed_s, touched_steps)
        return paused_s

    @property
    def totals(self) -> PauseTotals:
        """Pauses so far: those of the supervisor, and those of the rank that was stopped longest."""
        longest = max(self._ranks.values(), default=PauseTotals())
        ranks = longest if longest.all_s >= _RANK_S else PauseTotals()
        return PauseTotals(self._own.all_s + ranks.all_s, self._own.in_steps_s + ranks.in_steps_s)


def _add(totals: PauseTotals, seconds: float, in_steps: bool) -> PauseTotals:
    return PauseTotals(totals.all_s + seconds, totals.in_steps_s + (seconds if in_steps else 0.0))


def _read_moment() -> Moment:
    active = 0.0  # of a kernel without these counts
    with contextlib.suppress(OSError, ValueError):
        computed_ns, waited_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
        active = (int(computed_ns) + int(waited_ns)) / 1e9
    return Moment(time.clock_gettime(time.CLOCK_BOOTTIME), active)


def _read_state(pid: int) -> str:
    """Return the state of a process in the kernel's letters; empty for one that has ended."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""
