"""What a step waits for: its batch, its slowest rank, its turn in a schedule."""

import statistics

from analysis.metrics import Metric
from analysis.observed import get_window, list_own_seconds
from bench.core.quantities import compare_to_alike
from bench.core.record import RunRecord


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
    """Straggling: the slowest rank's own time in a step, outside its collectives, over the median rank's. In a pipeline
    the ranks with the same part of the layers are compared; None where no two have it."""
    ranks, parts = list_own_seconds(record), record.spec.parallel.pipeline
    compared = compare_to_alike(ranks, parts)
    if len(ranks) < 2 * parts or min(usual for _, usual in compared) <= 0:
        return None
    return max(own / usual for own, usual in compared)


def compute_idle_share(record: RunRecord) -> float | None:
    """Part of a step in which a rank waited for another one's part of a pipeline, mean over ranks: untimed steps after
    the window, over the window's median."""
    shares = list_idle_shares(record)
    return statistics.mean(shares) if shares else None


def list_idle_shares(record: RunRecord) -> list[float]:
    """Return the same by rank; empty unless all ranks' are known."""
    timed, observed = get_window(record), record.observations
    if timed is None or observed is None or not observed.idle_s or None in observed.idle_s:
        return []
    return [seconds / statistics.median(timed.step_s) for seconds in observed.idle_s if seconds is not None]


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
    Metric(
        "idle_share", "wait for other stages, part of a step, mean of ranks", "of step time", "less", compute_idle_share
    ),
)
