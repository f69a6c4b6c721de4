"""Options of FSDP2, the number of ranks that share a copy of the model, and the check of specs for this engine."""

from typing import Literal

from pydantic import Field, StrictBool

from bench.core.errors import UserError
from bench.core.spec import Device, Positive, RunSpec
from bench.engines import EngineOptions
from bench.engines.precision import check_unscaled, check_whole


class Options(EngineOptions):
    """Options of torch.distributed.fsdp.fully_shard. Options that decide speed or memory have no default."""

    reshard_after_forward: StrictBool | Positive = Field(
        description="gathered weights of a block after its forward. true: freed, and gathered again for backward; "
        "false: kept whole until backward; a number N: partitioned among groups of N neighbouring ranks, and gathered "
        "within the group for backward"
    )
    shard_ranks: Literal["node"] | Positive | None = Field(
        None,
        description="number of ranks among which one copy of weights, gradients and optimizer state is partitioned. An "
        "all-reduce of gradients keeps the copies equal. None: one copy over all ranks; node: one copy per node "
        "(hybrid sharding), if nodes have several ranks",
    )
    reduce_dtype: Literal["bf16", "fp32"] | None = Field(
        description="number format in which gradients are reduced; None: the run's precision"
    )
    reduce_every_micro_step: bool = Field(
        True,
        description="True: gradients are reduced and partitioned after every micro-step; False: only after the last "
        "micro-step, so that each rank keeps whole gradients until then",
    )
    offload: bool = Field(
        False, description="True: weights, gradients and optimizer state are in host memory, and AdamW runs on the CPU"
    )
    pin_memory: bool = Field(True, description="True: offloaded states are in page-locked memory")


def check(options: Options, spec: RunSpec, device: Device | None = None) -> None:
    """Raise UserError if this engine cannot run the spec."""
    check_unscaled(spec)
    check_whole(spec, "some of their rows")
    if spec.precision == "fp32" and options.reduce_dtype == "bf16":
        rule, remedy = "a run with precision=fp32 reduces in fp32", "remove engine.reduce_dtype, or set precision=bf16"
        raise UserError("engine.reduce_dtype=bf16", rule, remedy)
    ranks, again = shard_ranks(options, spec), options.reshard_after_forward
    value = f"engine.shard_ranks={options.shard_ranks}"
    if spec.data_parallel % ranks:
        rule = f"does not divide the {spec.data_parallel} data-parallel ranks"
        raise UserError(value, rule, f"set a divisor of {spec.data_parallel}, or remove it")
    if ranks == 1 < spec.data_parallel:
        remedy = "set engine=ddp, or a larger engine.shard_ranks"
        raise UserError(value, "with one rank per copy, nothing is partitioned", remedy)
    if not isinstance(again, bool) and (again == 1 or again >= ranks or ranks % again):
        rule = f"must divide the {ranks} ranks that share one copy, and be at least 2 and below {ranks}"
        raise UserError(f"engine.reshard_after_forward={again}", rule, "set such a number, or true or false")


def shard_ranks(options: Options, spec: RunSpec) -> int:
    """Return the number of ranks that share one copy of weights, gradients and optimizer state."""
    if options.shard_ranks is None:
        return spec.data_parallel
    if options.shard_ranks == "node":
        return spec.devices_per_node if 1 < spec.devices_per_node < spec.data_parallel else spec.data_parallel
    return options.shard_ranks
