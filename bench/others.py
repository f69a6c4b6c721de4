"""Rules for deciding that a machine was busy during a run. Used when measuring and when reading records.

On two cores beside processes that took 60 to 86 % of them, five runs of one point took from 0.34 to 1.02 s a step, up
to fifteen times as long as on quiet cores. Runs of the smoke study alone on two cores find 0.6 to 1.3 % of background
load; two such studies at once 49 to 50 % each.

Of 208 recorded runs whose load is known 77 are busy, all of them by processor time. Those that are not had at most
2.3 % of pressure for input and output and none for memory, so 5 % leaves room for what a run causes itself.
"""

from bench.record import NodeLoad, Observations

BUSY_SHARE = 0.05
"""Of the time of all cores that the run may use: its steps are 5 % longer, as configurations differ."""
PRESSURE_SHARE = 0.05
"""Of the window: some task, perhaps the run's own, waited for memory, or for input and output."""
FOREIGN_BYTES = 2**28
"""Device memory above which another process counts as background load. A display server uses less."""


def taken(load: NodeLoad) -> float | None:
    """Return the share of a node's cores that others had, the hypervisor's other guests too; None where unknown."""
    known = [share for share in (load.others_share, load.stolen_share) if share is not None]
    return sum(known) if known else None


def is_busy(observed: Observations, window_s: float) -> bool:
    """Whether background load, waits for memory or for input and output, a quota or another process on a device
    mattered on any node during the window, or whether the record was marked so by a person afterwards."""
    if observed.known_busy is not None:
        return True
    for load in observed.load or ():
        if (taken(load) or 0.0) > BUSY_SHARE or (load.throttled_s or 0.0) > BUSY_SHARE * window_s:
            return True
        if max(load.memory_pressure_share or 0.0, load.io_pressure_share or 0.0) > PRESSURE_SHARE:
            return True
    return any(
        use.other_processes and (use.other_bytes is None or use.other_bytes >= FOREIGN_BYTES)
        for use in observed.device_use or ()
    )
