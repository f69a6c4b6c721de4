"""When others on the machine took so much of it that a run says less of what it asked: the rules, for those who measure
and those who read.

A run that uses all of its cores has what others leave: its steps take 1 / (1 - share) as long. On two cores beside
others that took 60 to 86 % of them, five runs of one point did so within a fifth, from 0.34 to 1.02 s a step. Runs of
the smoke study alone on two cores find 0.6 to 1.3 % with others; two such studies at once 49 to 50 % with each other.
"""

from bench.record import NodeLoad, Observations

BUSY_SHARE = 0.05
"""Of the time of all cores that the run may use: its steps are 5 % longer, as configurations differ."""
FOREIGN_BYTES = 2**28
"""Of somebody else's processes on a device: a display, or a monitor, has less."""


def taken(load: NodeLoad) -> float | None:
    """Return the share of a node's cores that others had, the hypervisor's other guests too; None where unknown."""
    known = [share for share in (load.others_share, load.stolen_share) if share is not None]
    return sum(known) if known else None


def is_busy(observed: Observations, window_s: float) -> bool:
    """Whether others took enough of any node, or of a device, during the window; or a quota held the run back."""
    for load in observed.load or ():
        if (taken(load) or 0.0) > BUSY_SHARE or (load.throttled_s or 0.0) > BUSY_SHARE * window_s:
            return True
    return any(
        use.other_processes and (use.other_bytes is None or use.other_bytes >= FOREIGN_BYTES)
        for use in observed.device_use or ()
    )
