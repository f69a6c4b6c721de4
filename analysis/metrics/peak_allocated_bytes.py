"""Peak of live tensor bytes over steady steps, on the rank with most."""

from analysis.observed import find_worst_rank_value
from bench.record import RunRecord

LABEL, UNIT, BETTER = "peak allocated, steady steps, worst rank", "bytes", "less"


def value(record: RunRecord) -> int | None:
    return find_worst_rank_value(record, "peak_allocated_bytes")
