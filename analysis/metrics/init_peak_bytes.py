"""Peak of live tensor bytes while model and engine were built, on the rank with most."""

from analysis.observed import find_worst_rank_value
from bench.record import RunRecord

LABEL, UNIT, BETTER = "peak allocated, initialisation, worst rank", "bytes", "less"


def value(record: RunRecord) -> int | None:
    return find_worst_rank_value(record, "init_peak_bytes")
