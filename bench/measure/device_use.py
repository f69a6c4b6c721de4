"""What one rank's own device did while it was timed: clock, power, throttling, energy, and others on it.

Written by the manuals of NVML and of AMD SMI, and not tried on a GPU yet.
"""

import statistics
import time
from collections.abc import Collection, Mapping

from bench.measure import devices
from bench.record import DeviceUse


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
