"""How unevenly memory is divided: the peak of live tensor bytes on the rank with most, less that with least."""

from analysis.observed import list_by_rank
from bench.record import RunRecord

LABEL, UNIT, BETTER = "peak allocated, worst rank less best rank", "bytes", "less"


def value(record: RunRecord) -> int | None:
    ranks = list_by_rank(record, "peak_allocated_bytes")
    return max(ranks) - min(ranks) if len(ranks) > 1 else None
