"""Options of torch.nn.parallel.DistributedDataParallel, and the check of specs for this engine."""

from pydantic import Field

from bench.core.spec import Device, RunSpec
from bench.engines import EngineOptions
from bench.engines.precision import LossScale, check_optimizer


class Options(EngineOptions):
    """Options of torch.nn.parallel.DistributedDataParallel, and of the loss scale for fp16."""

    bucket_cap_mb: float = Field(
        gt=0, description="MiB of gradients per bucket; each bucket is reduced by one all-reduce"
    )
    gradient_as_bucket_view: bool = Field(
        True,
        description="True: gradients are views of the buckets; False: each gradient exists twice, also in its bucket",
    )
    static_graph: bool = Field(False, description="True: every step uses the same parameters in the same order")
    fp16: LossScale = LossScale()


def check(options: Options, spec: RunSpec, device: Device | None = None) -> None:
    """Raise UserError if this engine cannot run the spec."""
    check_optimizer(spec)
