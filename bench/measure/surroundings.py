"""What happens around a rank while it is timed: others on its node, and its own device."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from bench.measure import device_use, devices, load
from bench.measure.failures import Refused
from bench.measure.load import Monitor, Whereabouts
from bench.measure.peers import Peers
from bench.others import BUSY_SHARE, taken
from bench.record import DeviceUse, NodeLoad

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
        self._opened: load.LoadReading | None = None
        self._use = device_use.DeviceWatch(rank, uuid, self._numbers()) if uuid else None

    def wait_until_quiet(self, within_s: float, peers: Peers, still_here: Callable[[], None]) -> None:
        """Return once others take less of every node than makes a run `busy`; raise Refused where they do not within
        `within_s`. Ranks wait without computing meanwhile. `still_here` is called again and again."""
        until = time.monotonic() + within_s
        while True:
            still_here()
            before = self._read()
            time.sleep(_LOOK_S)
            seen = load.between(self._node, before, self._read())
            found = [seen_load for seen_load in peers.gather(seen) if seen_load is not None]
            noisy = [seen_load for seen_load in found if (taken(seen_load) or 0.0) > BUSY_SHARE]
            why = f"others take {100 * (taken(noisy[0]) or 0):.0f} % of node {noisy[0].node}" if noisy else ""
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
        seen = Surrounded(load=load.between(self._node, self._opened, self._read()))
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

    def _read(self) -> load.LoadReading | None:
        return self._monitor.read() if self._monitor else None
