"""Predicted time of one optimizer step: the seconds of each part (such as backward), the name of the largest part, and
an uncertainty interval of the whole step's seconds.

Compute time comes from the machine's rates or from a rehearsal of one rank. Communication time comes from the bytes
that the engine moves and from the links that they cross. Overlap comes from the engine's schedule. The only numbers
that were fitted to measured step times are the engines' operations on the host of a GPU (`EngineFacts.host_operations`
and `host_operations_of_update`).
"""

from collections.abc import Sequence
from typing import NamedTuple

from bench.core.engine_costs import SimulatedPass
from bench.core.machine import Machine
from bench.core.spec import Device, RunSpec
from bench.predict.step_time.compute import ComputeTime, StepContext, predict_compute_time
from bench.predict.step_time.network import MOVED, TransferTime, time_transfers
from bench.predict.step_time.pipeline import list_pipeline_passes, time_pipeline
from bench.predict.work import StepFlops, compute_flops_per_step
from bench.predict.workload import OWN, Software, predict_engine_step, predict_pipeline

COMPUTING = ("forward", "recomputation", "backward", "optimizer", "stragglers", "idle")
"""Names of the parts of a step whose time depends on the device's rates. In the part `stragglers` a rank waits for
slower ranks, and in the part `idle` it waits for other stages of a pipeline."""
MOST_PASSES = 4096
"""Largest number of passes of a step that `predict_passes` lists."""
NAMES = {"all_reduce": "all-reduce", "all_gather": "gather", "reduce_scatter": "reduce-scatter"}


class StepTime(NamedTuple):
    """Predicted time of one optimizer step, with its tokens and FLOPs."""

    parts: dict[str, float]  # seconds by name; their sum is the step's time
    hidden_s: float  # seconds of communication that overlap with compute
    low_s: float  # ends of the uncertainty interval
    high_s: float
    flops: StepFlops
    tokens: int  # tokens of all kinds over all ranks, including padding
    peak_flops: float | None  # peak FLOP/s of all devices together
    bound: str  # name of the largest part of the step
    exposed_s: float = 0.0  # seconds of communication for which the step waits

    @property
    def step_s(self) -> float:
        return sum(self.parts.values())

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: model FLOP/s over the dense peak of all devices; None if the peak is unknown."""
        return self.flops.model / self.step_s / self.peak_flops if self.peak_flops else None


def predict_step_time(
    spec: RunSpec, machine: Machine, device: Device = "cuda", *, rehearsed_s: float | None = None,
    straggler: float = 1.0, data_wait_s: float = 0.0, software: Software = OWN,
) -> StepTime:  # fmt: skip
    """Return the predicted time of one step of `spec`. Raise UserError if the machine's file lacks a number that is
    needed, or if the engine cannot predict its costs.

    `rehearsed_s` is the number of computing seconds in a step of this spec, measured in a rehearsal (one rank alone) on
    this machine. `straggler` is the computing time of the slowest rank divided by that of the other ranks.
    `data_wait_s` is the number of seconds for which a step waits for its batches. `software` is the class of training
    software, which says how much its kernels are optimised; the default is the class of this project's engines.
    """
    context = StepContext(spec=spec, machine=machine, device=device, software=software, rehearsed_s=rehearsed_s)
    own, moved, idle_s = _time_rank(context)
    exposed_by_kind: dict[str, float] = {}
    for transfer, _, exposed_s in moved:
        name = NAMES[transfer.kind]
        exposed_by_kind[name] = exposed_by_kind.get(name, 0.0) + exposed_s
    # the order is that of the printed list
    parts = {
        "forward": own.forward,
        "recomputation": own.recomputation,
        "backward": own.backward,
        "optimizer": own.optimizer,
        "stragglers": (straggler - 1) * own.total,
        **exposed_by_kind,
        "idle": idle_s,
        "data": data_wait_s,
    }
    parts = {name: seconds for name, seconds in parts.items() if seconds}
    total, hidden = sum(parts.values()), sum(m.whole_s - m.exposed_s for m in moved)
    exposed = sum(m.exposed_s for m in moved)
    computing, (low, high) = straggler * own.total + idle_s, own.doubt
    peak = 1e12 * machine.peak_tflops.get(spec.precision, 0.0) * spec.world_size
    flops = compute_flops_per_step(spec)
    # An interval from a ratio of times may reach below the time that the FLOPs take at the peak rate.
    fastest_s = min(total, flops.model / peak) if peak else 0.0
    return StepTime(
        parts=parts,
        hidden_s=hidden,
        exposed_s=exposed,
        low_s=max(fastest_s, total + (low - 1) * computing + (MOVED[0] - 1) * exposed),
        high_s=total + (high - 1) * computing + (MOVED[1] - 1) * exposed + hidden,  # without any overlap
        flops=flops,
        tokens=spec.global_batch * spec.tokens_per_sample,
        peak_flops=peak or None,
        bound=_find_bound(moved, own, idle_s, spec),
    )


def predict_passes(
    spec: RunSpec, machine: Machine, device: Device, rehearsed_s: float | None = None, most: int = MOST_PASSES,
    software: Software = OWN,
) -> Sequence[SimulatedPass]:  # fmt: skip
    """Return start and end of each pass of a pipeline step, in seconds.

    Empty for an engine without a pipeline, and for a step with more than `most` passes. `rehearsed_s` is the number of
    computing seconds in a step, measured in a rehearsal (one rank alone). `software` is the class of training software,
    which says how much its kernels are optimised. Raise the errors of `predict_step_time`.
    """
    costs = predict_pipeline(spec, device) if spec.parallel.pipeline > 1 else None
    if costs is None or 2 * spec.accumulation * len(costs.parts) > most:
        return ()
    context = StepContext(spec=spec, machine=machine, device=device, software=software, rehearsed_s=rehearsed_s)
    return list_pipeline_passes(context, costs)


def _time_rank(context: StepContext) -> tuple[ComputeTime, list[TransferTime], float]:
    """Return computing time, transfers and idle seconds of one rank in a step. In a pipeline, they are those of the
    rank that is busy longest."""
    spec = context.spec
    if costs := predict_pipeline(spec, context.device):
        return time_pipeline(context, costs)
    added = predict_engine_step(spec, context.device)
    own = predict_compute_time(context, added.updated)
    return own, time_transfers(added.transfers, own, spec, context.machine, spec.accumulation), 0.0


def _find_bound(moved: list[TransferTime], own: ComputeTime, idle_s: float, spec: RunSpec) -> str:
    """Return a name for what limits the step, such as "links between nodes" or a kind of computing. The total time of
    all transfers is compared with the computing time. Transfers that overlap with computing are included in this total.
    If the total is longer than computing, faster links shorten the step, and faster computing does not."""
    moved_s = sum(one.whole_s for one in moved)
    if idle_s > max(own.total, moved_s):
        return "waiting for other stages"
    if moved_s > own.total:
        return "links between nodes" if spec.nodes > 1 else "links inside a node"
    return own.bound
