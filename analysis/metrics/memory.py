"""Memory of the rank that uses most, in bytes."""

from analysis.metrics import Metric, build_metric
from analysis.observed import find_worst_rank_value, list_by_rank
from bench.core.record import RunRecord


def compute_peak_allocated_spread_bytes(record: RunRecord) -> int | None:
    """Return the imbalance of memory between ranks: the highest peak of live tensor bytes of any rank, minus the lowest
    such peak."""
    ranks = list_by_rank(record, "peak_allocated_bytes")
    return max(ranks) - min(ranks) if len(ranks) > 1 else None


def _build_metric(name: str, label: str) -> Metric:
    """Return the metric for a field of RankMemory: the maximum over all ranks."""

    def compute(record: RunRecord) -> int | None:
        return find_worst_rank_value(record, name)

    return Metric(name, label, "bytes", "less", compute)


METRICS = (
    # peak of live tensors while model and engine are built
    _build_metric("init_peak_bytes", "peak bytes of live tensors during initialisation, on the rank with the most"),
    # peak of live tensors in the steps after warm-up
    _build_metric(
        "peak_allocated_bytes", "peak bytes of live tensors in the window of timed steps, on the rank with the most"
    ),
    build_metric(
        compute_peak_allocated_spread_bytes, "largest minus smallest peak_allocated_bytes over the ranks", "bytes"
    ),
    # peak of memory held by the caching allocator; unknown on a CPU
    _build_metric("peak_reserved_bytes", "peak bytes reserved by the caching allocator, on the rank with the most"),
    # live tensors between two steps: weights, optimizer state, persistent buckets
    _build_metric("resident_bytes", "bytes of live tensors between two steps, on the rank with the most"),
    # peak host memory of a rank's process
    _build_metric("peak_rss_bytes", "peak host memory (resident set) of the process of the rank with the most"),
)
