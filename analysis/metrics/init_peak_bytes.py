"""Peak of live tensor bytes while model and engine were built, on the rank with most."""

from analysis.observed import worst_rank
from bench.record import RunRecord

LABEL, UNIT, BETTER = "peak allocated, initialisation, worst rank", "bytes", "less"


def value(record: RunRecord) -> int | None:
    return worst_rank(record, "init_peak_bytes")
