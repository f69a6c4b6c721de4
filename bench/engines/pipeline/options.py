"""Options of the pipeline engine, and the check of specs for it."""

from typing import Annotated, Literal

from pydantic import Field

from bench.core.errors import UserError
from bench.core.spec import Device, RunSpec
from bench.engines import EngineOptions
from bench.engines.distributed.schedule import PipelineSize, ScheduleName, find_obstacle
from bench.engines.precision import check_unscaled, check_whole


class Options(EngineOptions):
    """Options of the pipeline engine: the schedule of the passes in a step, the division of the model into stages, and
    the sharding of weights, gradients and optimizer state among data-parallel copies."""

    schedule: ScheduleName = Field(
        description="order of passes in a step. gpipe: all forward, then all backward; 1f1b: each backward as early "
        "as possible; interleaved: 1f1b with several stages on a rank; breadth_first: a stage processes all "
        "micro-batches before the next stage of its rank begins"
    )
    cut: Literal["flops", "blocks"] = Field(
        "flops", description="flops: stages have nearly equal FLOPs; blocks: stages have nearly equal numbers of blocks"
    )
    sharding: Literal["zero1", "zero3"] = Field(
        "zero1",
        description="partitioned among the data-parallel ranks of a stage. zero1: AdamW's state; zero3: also weights "
        "and gradients, except parameters that several stages share. With zero3, the weights of a stage are "
        "gathered before it computes",
    )
    gather_ahead: Annotated[int, Field(ge=0)] = Field(
        1, description="with zero3: number of next stages whose weights are gathered while a stage computes"
    )


_ONE_STAGE = "parallel.pipeline=2 batch.accumulation=8"
_FIRST: dict[ScheduleName, str] = {
    "gpipe": _ONE_STAGE,
    "1f1b": _ONE_STAGE,
    "interleaved": "parallel.pipeline=2 parallel.stages_per_rank=2 batch.accumulation=8",
    "breadth_first": "parallel.stages_per_rank=2 batch.accumulation=8, and parallel.pipeline=2 if ranks share a copy",
}
"""Settings with which each schedule can be tried on two ranks. A schedule needs all of its settings."""


def check(options: Options, spec: RunSpec, device: Device | None = None) -> None:
    """Raise UserError if this engine cannot run the spec."""
    engine = f"engine {spec.engine.name}"
    if size_of(spec).stages == spec.parallel.tensor == 1:
        rule = f"{engine} needs at least two stages, or parallel.tensor of 2 or more"
        raise UserError("parallel.pipeline=1", rule, f"add {_FIRST[options.schedule]}; or choose engine=ddp")
    if obstacle := find_obstacle(options.schedule, size_of(spec)):
        rule, remedy = obstacle
        raise UserError(f"engine.schedule={options.schedule}", rule, remedy)
    check_unscaled(spec)
    check_whole(spec, "a part of one flat tensor")
    model = spec.model
    if model.dropout:
        rule = f"{engine} would apply dropout once more at every stage boundary"
        raise UserError(f"model.dropout={model.dropout}", rule, "set model.dropout=0")
    if model.compile != "none":
        rule = f"{engine} does not support it"
        raise UserError(f"model.compile={model.compile}", rule, "remove it, or choose another engine")
    if spec.parallel.tensor > 1 and model.attention == "flex":
        rule = "flex attention is untested with tensor parallelism"
        raise UserError("model.attention=flex", rule, "set model.attention=sdpa, or parallel.tensor=1")
    if spec.parallel.tensor > 1 and model.loss_chunk_tokens:
        rule = "with tensor parallelism, the loss cannot be computed in chunks"
        value = f"model.loss_chunk_tokens={model.loss_chunk_tokens}"
        raise UserError(value, rule, "remove it, or set parallel.tensor=1")


def size_of(spec: RunSpec) -> PipelineSize:
    """Return the size of a spec's pipeline: ranks, stages per rank, and micro-batches per step."""
    return PipelineSize(spec.parallel.pipeline, spec.parallel.stages_per_rank, spec.accumulation)
