"""What torch's DistributedDataParallel says of itself: everything on every rank, and the reference for losses."""

from bench.engine_facts import Division, EngineFacts, Rehearsal
from bench.spec import RunSpec


def facts(spec: RunSpec) -> EngineFacts:
    """Return what holds for this spec."""
    return EngineFacts(label="DDP", division=Division(), is_reference=True, rehearsal=Rehearsal("any"))
