"""Straggling: the slowest rank's own time before its first collective, over the median rank's.

Stage 3 gathers weights before it computes anything, so there that time tells nothing, and the column stays empty.
"""

import statistics

from bench.record import RunRecord

LABEL, UNIT, BETTER = "slowest rank over median rank, before collectives", "ratio", "less"


def value(record: RunRecord) -> float | None:
    ranks = record.observations.before_collectives_s if record.observations else ()
    gathers_first = record.spec.engine.options.get("stage") == 3
    known = not gathers_first and record.outcome.kind == "ok" and len(ranks) == record.spec.world_size > 1
    if not known or statistics.median(ranks) <= 0:
        return None
    return max(ranks) / statistics.median(ranks)
