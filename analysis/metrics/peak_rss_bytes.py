"""Peak resident set of a rank's process in host memory, on the rank with most."""

from analysis.observed import find_worst_rank_value
from bench.record import RunRecord

LABEL, UNIT, BETTER = "peak resident set, worst rank", "bytes", "less"


def value(record: RunRecord) -> int | None:
    return find_worst_rank_value(record, "peak_rss_bytes")
