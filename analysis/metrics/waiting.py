"""Time per step that ranks spend waiting, and bytes per step that they exchange."""

import statistics

from analysis.metrics import build_metric
from analysis.observed import get_window, list_own_seconds
from bench.core.quantities import compare_to_alike
from bench.core.record import RunRecord

_RECEIVED = "recv"  # not added, because the "send" of the other rank already counts


def compute_data_wait_s(record: RunRecord) -> float | None:
    """Return the median time per step spent waiting for the batch, in seconds, on the rank that waited longest."""
    timed = get_window(record)
    return statistics.median(timed.data_wait_s) if timed and timed.data_wait_s else None


def compute_data_wait_share(record: RunRecord) -> float | None:
    """Return the fraction of the step time spent waiting for the next batch, on the rank that waited longest.

    On a GPU the host may wait while the device still computes, so part of the wait may cost no time.
    """
    timed = get_window(record)
    return sum(timed.data_wait_s) / sum(timed.step_s) if timed and timed.data_wait_s else None


def compute_slowest_over_median(record: RunRecord) -> float | None:
    """Return the slowest rank's time per step outside collectives, divided by the median of this time over ranks.

    In a pipeline each rank is compared only with ranks of the same stage. None if a stage has fewer than two ranks.
    """
    ranks, stages = list_own_seconds(record), record.spec.parallel.pipeline
    compared = compare_to_alike(ranks, stages)
    if len(ranks) < 2 * stages or min(usual for _, usual in compared) <= 0:
        return None
    return max(own / usual for own, usual in compared)


def compute_idle_share(record: RunRecord) -> float | None:
    """Return the fraction of a step in which a rank waits for another pipeline stage, as the mean over all ranks."""
    shares = list_idle_shares(record)
    return statistics.mean(shares) if shares else None


def list_idle_shares(record: RunRecord) -> list[float]:
    """Return the fraction of a step in which each rank waits for another pipeline stage.

    The waiting time is measured in extra steps after the timed window, and divided by the median step time of the
    window. Empty unless the waiting time of every rank is known.
    """
    timed, observed = get_window(record), record.observations
    if timed is None or observed is None or not observed.idle_s or None in observed.idle_s:
        return []
    return [seconds / statistics.median(timed.step_s) for seconds in observed.idle_s if seconds is not None]


def compute_moved_bytes(record: RunRecord) -> int | None:
    """Return the payload bytes of a step's collectives and sends, summed over kinds of operation. For each kind, the
    value is that of the rank with the most bytes.

    The payload follows the convention of nccl-tests, so it is not the number of bytes on a link. In a ring, a link
    carries almost twice the payload during an all-reduce, and the payload about once during an all-gather.
    """
    observed = record.observations
    if observed is None or observed.collectives is None:
        return None
    kinds = observed.collectives.items()
    return sum(collective.payload_bytes for kind, collective in kinds if kind != _RECEIVED)


METRICS = (
    build_metric(compute_data_wait_s, "longest wait of a rank for its batch in a step, median over the window", "s"),
    build_metric(
        compute_data_wait_share,
        "longest wait of a rank for its batch in a step, divided by the step time",
        "of step time",
    ),
    build_metric(
        compute_slowest_over_median, "time per step outside collectives, slowest rank divided by median rank", "ratio"
    ),
    build_metric(
        compute_idle_share,
        "fraction of a step in which a rank waits for other pipeline stages, mean over ranks",
        "of step time",
    ),
    build_metric(
        compute_moved_bytes,
        "payload bytes of collectives and sends in a step; for each kind, those of the rank with the most",
        "bytes",
    ),
)
