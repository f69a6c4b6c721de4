"""Peak that the caching allocator held, on the rank with most; none on a CPU."""

from analysis.observed import worst_rank
from bench.record import RunRecord

LABEL, UNIT, BETTER = "peak reserved, worst rank", "bytes", "less"


def value(record: RunRecord) -> int | None:
    return worst_rank(record, "peak_reserved_bytes")
