"""Options of the pipeline engine, and the check of specs for it."""

from typing import Annotated, Literal

from pydantic import Field

from bench import engines
from bench.core.errors import UserError
from bench.core.spec import Device, Frozen, RunSpec
from bench.engines.distributed.schedule import PipelineSize, ScheduleName, find_obstacle
from bench.engines.precision import check_unscaled, check_whole


class Options(Frozen):
    """Options of the pipeline engine: the schedule of the passes in a step, the division of the model into stages, and
    the sharding of weights, gradients and optimizer state among data-parallel copies."""

    schedule: ScheduleName = Field(
        description="gpipe: all forwards, then all backwards; 1f1b: backwards as early as possible; interleaved: like "
        "1f1b, with several stages on a rank; breadth_first: each stage of a rank processes all "
        "micro-batches before the rank's next stage begins"
    )
    cut: Literal["flops", "blocks"] = Field(
        "flops", description="flops: stages have nearly equal FLOPs; blocks: nearly equal numbers of blocks"
    )
    sharding: Literal["zero1", "zero3"] = Field(
        "zero1",
        description="what the data-parallel ranks of a stage divide among themselves. zero1: AdamW's state; zero3: "
        "also weights and gradients, except parameters that several stages share. With zero3, a stage's "
        "weights are gathered before it computes. While it computes, the weights of the next `gather_ahead` "
        "stages are gathered",
    )
    gather_ahead: Annotated[int, Field(ge=0)] = 1


_ONE_STAGE = "parallel.pipeline=2 batch.accumulation=8"
_FIRST: dict[ScheduleName, str] = {
    "gpipe": _ONE_STAGE,
    "1f1b": _ONE_STAGE,
    "interleaved": "parallel.pipeline=2 parallel.stages_per_rank=2 batch.accumulation=8",
    "breadth_first": "parallel.stages_per_rank=2 batch.accumulation=8, and parallel.pipeline=2 if ranks share a copy",
}
"""Settings for a first run of each schedule on two ranks. All settings of a schedule are needed."""


def check(options: Options, spec: RunSpec, device: Device | None = None) -> None:
    """Raise UserError if this engine cannot run the spec."""
    engine = f"engine {spec.engine.name}"
    if size_of(spec).stages == spec.parallel.tensor == 1:
        rule = f"{engine} divides the layers among stages, and there is one"
        raise UserError("parallel.pipeline=1", rule, f"add {_FIRST[options.schedule]}; or choose engine=ddp")
    if obstacle := find_obstacle(options.schedule, size_of(spec)):
        rule, remedy = obstacle
        raise UserError(f"engine.schedule={options.schedule}", rule, remedy)
    check_unscaled(spec)
    check_whole(spec, "a part of one flat tensor")
    model = spec.model
    if model.dropout:
        rule = f"{engine} would drop a state at every boundary of stages"
        raise UserError(f"model.dropout={model.dropout}", rule, "set model.dropout=0")
    if model.compile != "none":
        rule = f"{engine} does not support it"
        raise UserError(f"model.compile={model.compile}", rule, "leave it out, or choose another engine")
    if spec.parallel.tensor > 1 and model.attention == "flex":
        rule = "it is untested on the heads of one tensor-parallel rank"
        raise UserError("model.attention=flex", rule, "set model.attention=sdpa, or parallel.tensor=1")
    if spec.parallel.tensor > 1 and model.loss_chunk_tokens:
        rule = "a rank has only the logits of its own tokens of the vocabulary, all at once"
        value = f"model.loss_chunk_tokens={model.loss_chunk_tokens}"
        raise UserError(value, rule, "leave it out, or set parallel.tensor=1")


def size_of(spec: RunSpec) -> PipelineSize:
    """Return the size of a spec's pipeline: ranks, stages per rank, and micro-batches per step."""
    return PipelineSize(spec.parallel.pipeline, spec.parallel.stages_per_rank, spec.accumulation)


def decode_options(spec: RunSpec) -> Options:
    """Return the spec's engine options, decoded from plain data."""
    return engines.decode_options(Options, spec)
