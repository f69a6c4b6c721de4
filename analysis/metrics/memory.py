"""Memory of the rank that uses most, in bytes."""

from analysis.metrics import Metric
from analysis.observed import find_worst_rank_value, list_by_rank
from bench.core.record import RunRecord


def compute_peak_allocated_spread_bytes(record: RunRecord) -> int | None:
    """Return the imbalance of memory: the highest of the ranks' peaks of live tensor bytes minus the lowest."""
    ranks = list_by_rank(record, "peak_allocated_bytes")
    return max(ranks) - min(ranks) if len(ranks) > 1 else None


def _build_metric(name: str, label: str) -> Metric:
    """Return the metric for a field of RankMemory: the maximum over all ranks."""

    def compute(record: RunRecord) -> int | None:
        return find_worst_rank_value(record, name)

    return Metric(name, label, "bytes", "less", compute)


METRICS = (
    # peak of live tensors while model and engine are built
    _build_metric("init_peak_bytes", "peak allocated, initialisation, worst rank"),
    # peak of live tensors in the steps after warm-up
    _build_metric("peak_allocated_bytes", "peak allocated, steady steps, worst rank"),
    Metric(
        "peak_allocated_spread_bytes",
        "peak allocated, worst rank less best rank",
        "bytes",
        "less",
        compute_peak_allocated_spread_bytes,
    ),
    # peak of memory held by the caching allocator; unknown on a CPU
    _build_metric("peak_reserved_bytes", "peak reserved, worst rank"),
    # live tensors between two steps: weights, optimizer state, persistent buckets
    _build_metric("resident_bytes", "allocated between steps, worst rank"),
    # peak host memory of a rank's process
    _build_metric("peak_rss_bytes", "peak resident set, worst rank"),
)
