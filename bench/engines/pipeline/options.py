"""What a pipeline may be given, and what it cannot do."""

import functools
import json
from typing import Annotated, Literal

from pydantic import Field

from bench.core.errors import UserError
from bench.core.spec import Frozen, RunSpec
from bench.engines.distributed.schedule import PipelineSize, ScheduleName, find_obstacle
from bench.engines.precision import check_unscaled


class Options(Frozen):
    """How the passes of a step are ordered, and the model is cut."""

    schedule: ScheduleName = Field(
        description="gpipe: all forwards, then all backwards; 1f1b: backwards as early as they can be; interleaved: "
        "the same with several stages on a rank; breadth_first: each stage takes all micro-batches before "
        "the rank's next one begins"
    )
    cut: Literal["flops", "blocks"] = Field(
        "flops", description="stages of nearly equal FLOPs, or of nearly as many blocks"
    )
    sharding: Literal["zero1", "zero3"] = Field(
        "zero1",
        description="what copies of a stage divide: zero1: AdamW's states; zero3: weights and gradients too, but for "
        "what several stages have; weights are gathered when their stage computes, those of the next so "
        "many while another one does",
    )
    gather_ahead: Annotated[int, Field(ge=0)] = 1


_ONE_STAGE = "parallel.pipeline=2 batch.accumulation=8"
_FIRST: dict[ScheduleName, str] = {
    "gpipe": _ONE_STAGE,
    "1f1b": _ONE_STAGE,
    "interleaved": "parallel.pipeline=2 parallel.stages_per_rank=2 batch.accumulation=8",
    "breadth_first": "parallel.stages_per_rank=2 batch.accumulation=8, and parallel.pipeline=2 if ranks share a copy",
}
"""What a first run of a schedule needs beside it: all at once, as two ranks can run it."""


def check(options: Options, spec: RunSpec, device: Literal["cpu", "cuda"] | None = None) -> None:
    """Raise UserError for what this engine cannot do."""
    if size_of(spec).stages == spec.parallel.tensor == 1:
        rule = f"engine {spec.engine.name} divides the layers among stages, and there is one"
        raise UserError("parallel.pipeline=1", rule, f"add {_FIRST[options.schedule]}; or choose engine=ddp")
    if obstacle := find_obstacle(options.schedule, size_of(spec)):
        rule, remedy = obstacle
        raise UserError(f"engine.schedule={options.schedule}", rule, remedy)
    check_unscaled(spec)
    if spec.model.dropout:
        rule = f"engine {spec.engine.name} would drop a state wherever the model is cut"
        raise UserError(f"model.dropout={spec.model.dropout}", rule, "set model.dropout=0")
    if spec.model.compile != "none":
        rule = f"engine {spec.engine.name} does not do it yet"
        raise UserError(f"model.compile={spec.model.compile}", rule, "leave it out, or choose another engine")
    if spec.parallel.tensor > 1:
        _check_sliced(spec)


def _check_sliced(spec: RunSpec) -> None:
    """Raise UserError for what sliced matrices cannot do."""
    if spec.model.attention == "flex":
        rule = "it was not tried on the heads of one tensor-parallel rank"
        raise UserError("model.attention=flex", rule, "set model.attention=sdpa, or parallel.tensor=1")
    if spec.model.loss_chunk_tokens:
        rule = "a rank has the logits of its own tokens of the vocabulary alone, all at once"
        value = f"model.loss_chunk_tokens={spec.model.loss_chunk_tokens}"
        raise UserError(value, rule, "leave it out, or set parallel.tensor=1")


def size_of(spec: RunSpec) -> PipelineSize:
    """Return the pipeline of a spec, and what goes through it."""
    return PipelineSize(spec.parallel.pipeline, spec.parallel.stages_per_rank, spec.accumulation)


def decode_options(spec: RunSpec) -> Options:
    """Return the options that a spec holds as plain data."""
    return _decode_cached(json.dumps(spec.engine.options))


@functools.lru_cache(maxsize=1024)  # points of a sweep share them, and decoding costs as much as predicting
def _decode_cached(plain: str) -> Options:
    return Options.model_validate_json(plain)
