"""What torch's DistributedDataParallel says of itself: everything on every rank, and the reference for losses."""

from typing import TYPE_CHECKING

from bench.engine_facts import Division, EngineFacts, Rehearsal
from bench.spec import Device, RunSpec

if TYPE_CHECKING:
    from bench.engine_costs import EngineStep, ModelSizes


def facts(spec: RunSpec) -> EngineFacts:
    """Return what holds for this spec."""
    return EngineFacts(label="DDP", division=Division(), is_reference=True, rehearsal=Rehearsal("any"), step=_step)


def _step(spec: RunSpec, model: "ModelSizes", device: Device) -> "EngineStep":
    from bench.engines.ddp.costs import step  # numpy, which readers of facts need not have

    return step(spec, model, device)
