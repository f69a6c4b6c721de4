"""From what every rank saw to one attempt's Observations, and every rank's own steps as a Parquet table.

Untimed steps after the window show what a rank does in a step: bytes per collective, the time outside of them
(collectives make everybody wait, so stragglers do not show in step times), FLOPs where no formula tells them, and what
its engine tells of a step.
"""

import io
import math
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.core.engine_facts import SUMMED_STEPS, Member
from bench.core.record import Collective, Link, Observations, Outcome, RankMemory, Steps, TimedPass, Tokens
from bench.core.spec import RunSpec
from bench.engines import OptionalMembers, facts
from bench.measure import memory
from bench.measure.collectives import CollectiveCounter, wait_for
from bench.measure.loop import Series, Trainer
from bench.measure.memory import MemoryTrace, PhasePeaks
from bench.measure.surroundings import Surrounded
from bench.measure.training import Training

_KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")


def count_flops(run: Callable[[], object]) -> int:
    """Return the matmul FLOPs of what `run` does on this rank, recomputed activations included.

    Fused attention counts over the full square, and its backward as two matmuls for each of forward although it
    computes scores again, as in bench.predict.work; torch's own counter takes them in, and knows no kernel of a CPU.
    """
    attention = {name: getattr(torch.ops.aten, f"_scaled_dot_product_{name}") for name in _KERNELS}
    backward = {name: getattr(torch.ops.aten, f"_scaled_dot_product_{name}_backward") for name in _KERNELS}
    formulas = dict.fromkeys(attention.values(), _count_forward_flops) | dict.fromkeys(
        backward.values(), _count_backward_flops
    )
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    with counter:
        run()
    return int(counter.get_total_flops())


def _count_forward_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the FLOPs of scores and weighted values, from shapes (samples, heads, tokens, width of a head)."""
    samples, heads, tokens, width = query
    return 2 * samples * heads * tokens * key[-2] * (width + value[-1])


def _count_backward_flops(gradient: Sequence[int], *forward: Any, **__: Any) -> int:
    return 2 * _count_forward_flops(*forward)


_STEPS = 3


@dataclass
class Inspection:
    """What this rank saw of itself."""

    collectives: dict[str, Collective] = field(default_factory=dict)  # of one step
    outside_collectives_s: float = 0.0  # of one step: waiting for its data included, for transfers of neighbours not
    flops: int | None = None  # of one step, if they were to be counted
    idle_s: float | None = None  # of one step; None where the engine does not tell
    passes: list[TimedPass] = field(default_factory=list)  # of one step; empty where the engine does not tell
    step_phases_s: dict[str, float] = field(default_factory=dict)  # of one step; empty where the engine does not tell


def inspect(
    trainer: Trainer, engine: OptionalMembers, members: Collection[Member], device: torch.device, *, counts_flops: bool
) -> Inspection:
    """Make a few more optimizer steps under observation; none of them is timed as a step. `members` are those that the
    engine has."""
    seen, outside = Inspection(), []
    for _ in range(_STEPS):
        wait_for(device)
        trainer.peers.barrier()
        counter, begin = CollectiveCounter(lambda: wait_for(device)), time.perf_counter()
        with counter:
            trainer.step()
        wait_for(device)
        own_s = time.perf_counter() - begin - counter.inside_s
        outside.append(max(0.0, own_s - _ask_transfer_wait_s(engine, members)))
        seen.collectives = {
            kind: Collective(calls=calls, payload_bytes=counter.payload_bytes[kind])
            for kind, calls in sorted(counter.calls.items())
        }
    seen.outside_collectives_s = statistics.median(outside)
    _ask_engine(trainer, engine, members, device, seen)
    if counts_flops:
        seen.flops = count_flops(trainer.step)
    return seen


def _ask_transfer_wait_s(engine: OptionalMembers, members: Collection[Member]) -> float:
    """Return what the engine tells of waiting that is in no collective: who waits for a neighbour would look as slow as
    whom it waits for."""
    if "transfer_wait_s" in members:
        return engine.transfer_wait_s()
    return engine.idle_s() if "idle_s" in members else 0.0


def _ask_engine(
    trainer: Trainer, engine: OptionalMembers, members: Collection[Member], device: torch.device, seen: Inspection
) -> None:
    """Add what the engine tells of a few steps that nothing else observes."""
    idle, phases = list[float](), []
    for _ in range(_STEPS if {"idle_s", "step_phases_s"}.intersection(members) else 0):
        trainer.peers.barrier()
        trainer.step()
        wait_for(device)
        if "idle_s" in members:
            idle.append(engine.idle_s())
        if "step_phases_s" in members:
            phases.append(engine.step_phases_s())
    if idle and "list_passes" in members:
        seen.passes = engine.list_passes()
    seen.idle_s = statistics.median(idle) if idle else None
    names = phases[0] if phases else {}
    seen.step_phases_s = {name: statistics.median(step[name] for step in phases) for name in names}


MOST_PASSES = 4096
"""Of a step that a record holds one by one."""


@dataclass
class RankView:
    """What one rank tells rank 0 when it is done."""

    memory: RankMemory
    phases_s: dict[str, float]
    seen: Inspection | None
    surrounded: Surrounded


def build_rank_memory(
    rank: int,
    device: torch.device,
    initialisation: MemoryTrace,
    rss_bytes: int,
    warmup: PhasePeaks | None,
    device_peak_bytes: int | None,
) -> RankMemory:
    """Put one rank's memory together at the end of its window, or of its warm-up if there was no window.

    `rss_bytes` is the resident set's peak after initialisation, `warmup` the allocator's peaks before the window, None
    where it was not opened.
    """
    latest = memory.read_peaks(device)
    window = latest if warmup else PhasePeaks(None, None)
    before = warmup or latest
    live = memory.read_live_bytes(device)
    # CUDA's count holds what cuBLAS allocates for itself, which no tensor reaches: there the comparison says nothing.
    comparable = live if device.type == "cpu" else None
    return RankMemory(
        rank=rank,
        init_peak_bytes=initialisation.peak_bytes,
        resident_bytes=live,
        warmup_peak_bytes=before.allocated_bytes,
        peak_allocated_bytes=window.allocated_bytes,
        peak_reserved_bytes=window.reserved_bytes,
        device_used_bytes=memory.read_device_used_bytes(device),
        init_reserved_bytes=initialisation.peak_reserved_bytes,
        warmup_reserved_bytes=before.reserved_bytes,
        device_peak_bytes=device_peak_bytes,
        init_rss_bytes=rss_bytes,
        peak_rss_bytes=memory.read_peak_rss_bytes(),
        loaders_rss_bytes=memory.read_loaders_rss_bytes(),
        drift=(comparable - memory.count_reachable_bytes(device)) / comparable if comparable else None,
    )


def build_observations(
    spec: RunSpec,
    series: Series,
    views: list[RankView],
    *,
    parameters: int,
    trainable_parameters: int,
    uninspected: str | None,
    engine_config: dict[str, Any],
    link: Link | None,
    data: dict[str, Any],
    drill: str | None,
    training: Training | None = None,
) -> Observations:
    """Return what the attempt observed; `views` are by rank."""
    seen = [view.seen for view in views if view.seen]
    around = [view.surrounded for view in views]
    energy = any(one.energy_j is not None for one in around)
    return Observations(
        parameters=parameters,
        trainable_parameters=trainable_parameters,
        engine_config=engine_config,
        phases_s={name: max(view.phases_s.get(name, 0.0) for view in views) for name in views[0].phases_s},
        steps=reduce_steps(series).model_copy(update={"summed_norms": _count_summed_norms(spec, training)}),
        tokens=count_tokens(spec, series),
        memory=tuple(view.memory for view in views),
        collectives=_select_heaviest(seen) if seen else None,
        outside_collectives_s=tuple(rank.outside_collectives_s for rank in seen),
        step_phases_s=_group_by_phase(seen),
        idle_s=tuple(rank.idle_s for rank in seen) if any(rank.idle_s is not None for rank in seen) else None,
        passes=select_passes(spec, seen),
        counted_flops=_sum_flops(spec, seen),
        uninspected=uninspected,
        link=link,
        load=tuple(one.load for one in around if one.load) or None,
        device_use=tuple(one.use for one in around if one.use) or None,
        energy_j=tuple(one.energy_j for one in around) if energy else (),
        energy_s=tuple(one.energy_s for one in around) if energy else None,
        data=data,
        drill=drill,
        evaluations=tuple(training.evaluations) if training else None,
        checkpoints=tuple(training.checkpoints) or None if training else None,
    )


def _count_summed_norms(spec: RunSpec, training: Training | None) -> int:
    """Return how many first updates have a norm that was summed in fp64: none where a training was resumed, which
    recorded other steps."""
    resumed = training is not None and any(one.kind == "load" for one in training.checkpoints)
    return SUMMED_STEPS if facts(spec).sums_norms and not resumed else 0


def _sum_flops(spec: RunSpec, seen: list[Inspection]) -> int | None:
    """Return the FLOPs of all ranks together; None where they were not counted, or not all ranks are real."""
    counted = [rank.flops for rank in seen if rank.flops is not None]
    return sum(counted) if len(counted) == spec.world_size else None


def select_passes(spec: RunSpec, seen: list[Inspection]) -> tuple[tuple[TimedPass, ...], ...] | None:
    """Return the passes of the first rank in each place of a pipeline; None where no engine told any, and where they
    would fill the record."""
    firsts = seen[:: spec.world_size // spec.parallel.pipeline] if len(seen) == spec.world_size else []
    number = sum(len(rank.passes) for rank in firsts)
    return tuple(tuple(rank.passes) for rank in firsts) if 0 < number <= MOST_PASSES else None


def drop_unknown(observed: Observations, *, computes: bool) -> Observations:
    """Leave out what a rehearsal cannot know: losses, and step times, in which communication is missing. What is left
    of the window is the time that a step computes, if it `computes`."""
    assert observed.steps
    compute_s = observed.steps.step_s[observed.steps.cut :] if computes else ()
    unknown = {"steps": None, "tokens": None, "outside_collectives_s": (), "step_phases_s": None, "idle_s": None}
    unknown |= {"passes": None}
    return observed.model_copy(update={**unknown, "compute_s": compute_s})


def reduce_steps(series: Series) -> Steps:
    """Reduce the ranks' series to the times between the slowest rank's completions and the mean loss."""
    norms, own_s = series.column("gradient_norm"), series.column("step_s")
    return Steps.model_validate(
        {
            "cut": series.warmup,
            "stopped": series.stopped,
            "step_s": tuple(series.step_s),
            "fastest_rank_s": tuple(own_s.amin(dim=1).tolist()),
            "slowest_rank_s": tuple(own_s.amax(dim=1).tolist()),
            "data_wait_s": tuple(series.column("data_wait_s").amax(dim=1).tolist()),
            "loss": _replace_infinite(series.losses.mean(dim=1)),
            "gradient_norm": () if norms.isnan().all() else _replace_infinite(norms.mean(dim=1)),
            "skipped": tuple(series.skipped),
            "window_s": series.window_s,
        }
    )


def build_outcome(series: Series) -> Outcome:
    """Return `ok`, or `invalid` with the step at which the numbers stopped being numbers."""
    if series.stopped != "invalid":
        return Outcome(kind="ok")
    finite = {
        "loss": series.losses.isfinite().all(dim=1),
        "gradient norm": ~series.column("gradient_norm").isinf().any(dim=1),
    }
    step, what = min((int((~good).nonzero()[0]), name) for name, good in finite.items() if not good.all())
    return Outcome(kind="invalid", reason=f"{what} is not finite at step {step}", evidence={"step": step, "what": what})


def count_tokens(spec: RunSpec, series: Series) -> Tokens | None:
    """Return the tokens of an optimizer step, averaged over the window; None where there is none, or where not all
    ranks are real."""
    if len(series.ranks) <= series.warmup or series.stopped == "invalid" or len(series.ranks[0]) != spec.world_size:
        return None
    padding = {
        kind: float(_sum_over_data_ranks(spec, series.column(f"{kind}_padding")[series.warmup :]).mean())
        for kind in spec.sequence
    }
    counted = {kind: float(spec.global_batch * length) for kind, length in spec.sequence.items()}
    return Tokens.counted(counted, padding)


def _sum_over_data_ranks(spec: RunSpec, counted: torch.Tensor) -> torch.Tensor:
    """Return the sums over data-parallel ranks of what each rank counted in a step, from shape (steps, ranks). Of the
    ranks that work on the same samples some may take no data at all; the others count the same."""
    by_place = counted.reshape(len(counted), spec.parallel.pipeline, spec.data_parallel, spec.parallel.tensor)
    return by_place.amax(dim=(1, 3)).sum(dim=1)


def write_steps_table(series: Series) -> bytes:
    """Return every rank's steps as a Parquet file: step, rank, window (bool) and the columns of `Series`."""
    count, ranks = len(series.ranks), series.ranks[0].shape[0] if series.ranks else 0
    step, rank = (number.reshape(-1) for number in np.indices((count, ranks), np.int32))
    columns = {
        "step": _build_column(step, pa.int32()),
        "rank": _build_column(rank, pa.int32()),
        "window": _build_column(step >= series.warmup, pa.bool_()),
    }
    for name in series.columns:
        columns[name] = _build_column(series.column(name).double().reshape(-1).numpy(), pa.float64())
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression="zstd")
    return buffer.getvalue()


def _build_column(values: np.ndarray[Any, Any], kind: pa.DataType) -> pa.Array:
    """Return a column without missing values, of their bytes: `pa.array` would import pandas, for half a second."""
    stored = np.packbits(values, bitorder="little") if values.dtype == bool else np.ascontiguousarray(values)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(stored)])


def _replace_infinite(values: torch.Tensor) -> tuple[float | None, ...]:
    return tuple(value if math.isfinite(value) else None for value in values.tolist())


def _group_by_phase(ranks: list[Inspection]) -> dict[str, tuple[float, ...]] | None:
    """Return each phase's seconds by rank, 0 on a rank that has no such phase; None where no engine told any."""
    phases = dict.fromkeys(phase for rank in ranks for phase in rank.step_phases_s)
    return {phase: tuple(rank.step_phases_s.get(phase, 0.0) for rank in ranks) for phase in phases} or None


def _select_heaviest(ranks: list[Inspection]) -> dict[str, Collective]:
    """Return, by kind, the collectives of the rank that moves most; they differ where partitions are uneven."""
    kinds = sorted({kind for rank in ranks for kind in rank.collectives})
    return {
        kind: max((rank.collectives[kind] for rank in ranks if kind in rank.collectives), key=lambda c: c.payload_bytes)
        for kind in kinds
    }
