"""Memory of the rank with most."""

from analysis.metrics import Metric
from analysis.observed import find_worst_rank_value, list_by_rank
from bench.core.record import RunRecord


def compute_init_peak_bytes(record: RunRecord) -> int | None:
    """Peak of live tensor bytes while model and engine were built, on the rank with most."""
    return find_worst_rank_value(record, "init_peak_bytes")


def compute_peak_allocated_bytes(record: RunRecord) -> int | None:
    """Peak of live tensor bytes over steady steps, on the rank with most."""
    return find_worst_rank_value(record, "peak_allocated_bytes")


def compute_peak_allocated_spread_bytes(record: RunRecord) -> int | None:
    """How unevenly memory is divided: the peak of live tensor bytes on the rank with most, less that with least."""
    ranks = list_by_rank(record, "peak_allocated_bytes")
    return max(ranks) - min(ranks) if len(ranks) > 1 else None


def compute_peak_reserved_bytes(record: RunRecord) -> int | None:
    """Peak that the caching allocator held, on the rank with most; none on a CPU."""
    return find_worst_rank_value(record, "peak_reserved_bytes")


def compute_resident_bytes(record: RunRecord) -> int | None:
    """Live tensor bytes between two steps, on the rank with most: weights, optimizer state, buckets that stay."""
    return find_worst_rank_value(record, "resident_bytes")


def compute_peak_rss_bytes(record: RunRecord) -> int | None:
    """Peak resident set of a rank's process in host memory, on the rank with most."""
    return find_worst_rank_value(record, "peak_rss_bytes")


METRICS = (
    Metric("init_peak_bytes", "peak allocated, initialisation, worst rank", "bytes", "less", compute_init_peak_bytes),
    Metric(
        "peak_allocated_bytes",
        "peak allocated, steady steps, worst rank",
        "bytes",
        "less",
        compute_peak_allocated_bytes,
    ),
    Metric(
        "peak_allocated_spread_bytes",
        "peak allocated, worst rank less best rank",
        "bytes",
        "less",
        compute_peak_allocated_spread_bytes,
    ),
    Metric("peak_reserved_bytes", "peak reserved, worst rank", "bytes", "less", compute_peak_reserved_bytes),
    Metric("resident_bytes", "allocated between steps, worst rank", "bytes", "less", compute_resident_bytes),
    Metric("peak_rss_bytes", "peak resident set, worst rank", "bytes", "less", compute_peak_rss_bytes),
)
