"""What torch.nn.parallel.DistributedDataParallel may be given, and what it cannot do."""

import functools
import json
from typing import Literal

from pydantic import Field

from bench.core.errors import UserError
from bench.core.spec import Frozen, RunSpec
from bench.engines.precision.optimizer import LossScale


class Options(Frozen):
    """What torch.nn.parallel.DistributedDataParallel may be given, and fp16's loss scale."""

    bucket_cap_mb: float = Field(gt=0, description="MiB of gradients per all-reduce")
    gradient_as_bucket_view: bool = Field(True, description="false holds every gradient twice")
    static_graph: bool = False
    fp16: LossScale = LossScale()


def check(options: Options, spec: RunSpec, device: Literal["cpu", "cuda"] | None = None) -> None:
    """Raise UserError for what this engine cannot do."""
    if spec.optimizer.implementation == "native":
        rule = f"engine {spec.engine.name} has no optimizer of its own"
        raise UserError("optimizer.implementation=native", rule, "use torch or fused")


def decode_options(spec: RunSpec) -> Options:
    """Return the options that a spec holds as plain data."""
    return _decode_cached(json.dumps(spec.engine.options))


@functools.lru_cache(maxsize=1024)  # points of a sweep share them, and decoding costs as much as predicting
def _decode_cached(plain: str) -> Options:
    return Options.model_validate_json(plain)
