"""What a step waits for: its batch, its slowest rank."""

import statistics

from analysis.metrics import Metric
from analysis.observed import get_window, list_own_seconds
from bench.record import RunRecord


def compute_data_wait_s(record: RunRecord) -> float | None:
    """Median time that a step of the window waited for its batch, on the rank that waited longest."""
    timed = get_window(record)
    return statistics.median(timed.data_wait_s) if timed and timed.data_wait_s else None


def compute_data_wait_share(record: RunRecord) -> float | None:
    """Part of the window's steps that was spent waiting for the next batch, on the rank that waited longest.

    On a GPU the host waits while the device may still have work, so that some of it can be hidden.
    """
    timed = get_window(record)
    return sum(timed.data_wait_s) / sum(timed.step_s) if timed and timed.data_wait_s else None


def compute_slowest_over_median(record: RunRecord) -> float | None:
    """Straggling: the slowest rank's own time in a step, outside its collectives, over the median rank's."""
    ranks = list_own_seconds(record)
    if len(ranks) < 2 or statistics.median(ranks) <= 0:
        return None
    return max(ranks) / statistics.median(ranks)


METRICS = (
    Metric("data_wait_s", "median wait for data per step", "s", "less", compute_data_wait_s),
    Metric(
        "data_wait_share", "wait for data, part of the steps' time", "of step time", "less", compute_data_wait_share
    ),
    Metric(
        "slowest_over_median",
        "slowest rank over median rank, outside collectives",
        "ratio",
        "less",
        compute_slowest_over_median,
    ),
)
