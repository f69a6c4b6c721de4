"""Peak that the caching allocator held, on the rank with most; none on a CPU."""

from analysis.observed import find_worst_rank_value
from bench.record import RunRecord

LABEL, UNIT, BETTER = "peak reserved, worst rank", "bytes", "less"


def value(record: RunRecord) -> int | None:
    return find_worst_rank_value(record, "peak_reserved_bytes")
