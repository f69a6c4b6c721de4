"""What of a pipeline's run decides its memory and what it moves, whatever its micro-batch."""

from typing import NamedTuple

from bench.distributed.schedule import PipelineSize, ScheduleName
from bench.engines.pipeline.options import decode_options, size_of
from bench.spec import WIDTH, Device, OptimizerSpec, RunSpec


class PipelineRun(NamedTuple):
    """What of a pipeline's run decides its costs beside its passes."""

    schedule: ScheduleName
    size: PipelineSize
    ahead: int | None  # stages whose weights are gathered while another one computes; None: none are divided
    copies: int
    tensor: int
    sequence: bool
    width: int  # bytes per element of weights and gradients
    optimizer: OptimizerSpec
    device: Device
    gloo: bool  # gloo gathers and reduces: it works on a copy of the larger tensor
    devices_per_node: int
    world_size: int


def build_run(spec: RunSpec, device: Device, *, rehearsed: bool) -> PipelineRun:
    """Return what decides the costs of `spec`. Collectives that are only `rehearsed` need no memory of their own."""
    options, copies = decode_options(spec), spec.data_parallel
    return PipelineRun(
        schedule=options.schedule,
        size=size_of(spec),
        ahead=options.gather_ahead if options.sharding == "zero3" and copies > 1 else None,
        copies=copies,
        tensor=spec.parallel.tensor,
        sequence=spec.parallel.sequence,
        width=WIDTH[spec.precision],
        optimizer=spec.optimizer,
        device=device,
        gloo=device == "cpu" and not rehearsed and copies > 1,
        devices_per_node=spec.devices_per_node,
        world_size=spec.world_size,
    )


class FlatTensors(NamedTuple):
    """The parameters of the ranks in one place: elements of the flat tensors, with as many for each copy."""

    kept: tuple[int, ...]  # whole on every copy: of this place alone, then of each set of places that have the same
    gathered: tuple[int, ...]  # by stage; 0 where nothing of it is divided
    copies: int

    @property
    def own(self) -> list[int]:
        """Elements that one rank updates, by tensor."""
        return [size // self.copies for size in (*self.gathered, *self.kept) if size]
