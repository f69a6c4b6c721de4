"""What ranks move between each other in a step, in bytes."""

from analysis.metrics import Metric
from bench.core.record import RunRecord

_RECEIVED = "recv"  # another rank's "send"


def compute_moved_bytes(record: RunRecord) -> int | None:
    """Payload of a step's collectives and of what is sent to neighbours, of each kind that of the rank with most of it.
    As nccl-tests counts it: what is reduced on all ranks crosses a ring's link almost twice, what is gathered once."""
    observed = record.observations
    if observed is None or observed.collectives is None:
        return None
    kinds = observed.collectives.items()
    return sum(collective.payload_bytes for kind, collective in kinds if kind != _RECEIVED)


METRICS = (Metric("moved_bytes", "payload between ranks in a step", "bytes", "less", compute_moved_bytes),)
