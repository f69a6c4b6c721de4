"""Conversion of the results of all ranks into the Observations of an attempt (one try at a run), and into a Parquet
table of all steps.

After the window a few untimed steps are inspected. They give the bytes of each kind of collective, and the time outside
of collectives. They also give values that the engine reports about a step, such as its idle time. For models without a
FLOP formula they also give counted FLOPs. Stragglers (slow ranks) are not visible in step times, because every rank
waits for the stragglers in collectives. They are visible in the time outside of collectives.
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
from bench.core.record import Collective, Observations, Outcome, RankMemory, Steps, TimedPass, Tokens
from bench.core.spec import RunSpec
from bench.engines import OptionalMembers, facts
from bench.measure import memory
from bench.measure.collectives import CollectiveCounter, wait_for
from bench.measure.loop import Series, Trainer
from bench.measure.memory import PhasePeaks
from bench.measure.surroundings import Surrounded
from bench.measure.training import Training

_KERNELS = ("flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu")
_STEPS = 3  # inspected steps; the median of their times is recorded
MOST_PASSES = 4096
"""Maximum number of forward and backward passes in a step. With more passes, the record does not list them."""


def count_flops(run: Callable[[], object]) -> int:
    """Return the matmul FLOPs of `run` on this rank, including those of recomputed activations.

    Fused attention is counted by the convention of bench.predict.work. Its forward FLOPs are those of attention without
    a causal mask. Its backward FLOPs are twice its forward FLOPs. torch's own formulas are replaced for two reasons.
    They count recomputed scores in the backward pass, and there are no formulas for the CPU kernels.
    """
    formulas: dict[Any, Callable[..., int]] = {}
    for name in _KERNELS:
        operation = f"_scaled_dot_product_{name}"
        formulas[getattr(torch.ops.aten, operation)] = _count_attention_flops
        formulas[getattr(torch.ops.aten, f"{operation}_backward")] = _count_backward_flops
    with FlopCounterMode(display=False, custom_mapping=formulas) as counter:
        run()
    return int(counter.get_total_flops())


def _count_attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Return the FLOPs of attention scores and weighted values. Shapes are (samples, heads, tokens, head size)."""
    samples, heads, tokens, width = query
    return 2 * samples * heads * tokens * key[-2] * (width + value[-1])


def _count_backward_flops(gradient: Sequence[int], *forward: Any, **__: Any) -> int:
    return 2 * _count_attention_flops(*forward)


@dataclass
class Inspection:
    """Results of this rank from a few additional steps after the measurement window: its collectives, its FLOPs, its
    forward and backward passes in a pipeline, and times such as the seconds outside of collectives. All values are per
    step."""

    collectives: dict[str, Collective] = field(default_factory=dict)
    outside_collectives_s: float = 0.0  # including waits for data, but not for pipeline transfers
    flops: int | None = None  # None: not counted
    idle_s: float | None = None  # None: not reported by the engine
    passes: list[TimedPass] = field(default_factory=list)  # empty if the engine reports none, as is step_phases_s
    step_phases_s: dict[str, float] = field(default_factory=dict)


def inspect(
    trainer: Trainer, engine: OptionalMembers, members: Collection[Member], device: torch.device, *, counts_flops: bool
) -> Inspection:
    """Make a few untimed optimizer steps after the measurement window. Return this rank's collectives and times in
    these steps.

    `members` are the names of the optional methods that the engine supports. With `counts_flops`, one more step counts
    FLOPs.
    """
    seen, outside = Inspection(), []
    for _ in range(_STEPS):
        wait_for(device)
        trainer.peers.barrier()
        counter, begin = CollectiveCounter(lambda: wait_for(device)), time.perf_counter()
        with counter:
            trainer.step()
        wait_for(device)
        own_s = time.perf_counter() - begin - counter.inside_s
        # Waiting for a pipeline neighbour is subtracted. Otherwise a rank would look as slow as the rank it waits for.
        if "transfer_wait_s" in members:
            own_s -= engine.transfer_wait_s()
        elif "idle_s" in members:
            own_s -= engine.idle_s()
        outside.append(max(0.0, own_s))
        seen.collectives = {
            kind: Collective(calls=calls, payload_bytes=counter.payload_bytes[kind])
            for kind, calls in sorted(counter.calls.items())
        }
    seen.outside_collectives_s = statistics.median(outside)
    idle, phases = list[float](), list[dict[str, float]]()
    for _ in range(_STEPS if {"idle_s", "step_phases_s"}.intersection(members) else 0):
        trainer.peers.barrier()
        trainer.step()
        wait_for(device)
        if "idle_s" in members:
            idle.append(engine.idle_s())
        if "step_phases_s" in members:
            phases.append(engine.step_phases_s())
    if idle:
        seen.idle_s = statistics.median(idle)
        seen.passes = engine.list_passes() if "list_passes" in members else []
    if phases:
        seen.step_phases_s = {name: statistics.median(step[name] for step in phases) for name in phases[0]}
    if counts_flops:
        seen.flops = count_flops(trainer.step)
    return seen


@dataclass
class RankView:
    """Results of one rank, which are gathered on rank 0 at the end of the run."""

    memory: RankMemory
    phases_s: dict[str, float]
    seen: Inspection | None
    surrounded: Surrounded


def build_rank_memory(
    rank: int,
    device: torch.device,
    initialisation: PhasePeaks,
    rss_bytes: int,
    warmup: PhasePeaks | None,
    device_peak_bytes: int | None,
) -> RankMemory:
    """Return the memory of one rank. Call this at the end of its timed window or, if there was none, at the end of its
    warm-up.

    `initialisation` has the memory peaks during the initialisation of the model, and `rss_bytes` is the peak resident
    set after the initialisation. `warmup` has the memory peaks between initialisation and window; None if there was no
    window. `device_peak_bytes` is the highest memory use of the device, by all processes together.
    """
    latest = memory.read_peaks(device)
    window = latest if warmup else PhasePeaks(None, None)
    before = warmup or latest
    live = memory.read_live_bytes(device)
    # The count of a GPU's allocator includes memory of cuBLAS that belongs to no tensor, so it is not compared.
    comparable = live if device.type == "cpu" and initialisation.reserved_bytes is None else None
    return RankMemory(
        rank=rank,
        init_peak_bytes=initialisation.allocated_bytes,
        resident_bytes=live,
        warmup_peak_bytes=before.allocated_bytes,
        peak_allocated_bytes=window.allocated_bytes,
        peak_reserved_bytes=window.reserved_bytes,
        device_used_bytes=memory.read_device_used_bytes(device),
        init_reserved_bytes=initialisation.reserved_bytes,
        warmup_reserved_bytes=before.reserved_bytes,
        least_reserved_bytes=memory.find_least_reserved_bytes(device),
        device_peak_bytes=device_peak_bytes,
        init_rss_bytes=rss_bytes,
        peak_rss_bytes=memory.read_peak_rss_bytes(),
        loaders_rss_bytes=memory.read_loaders_rss_bytes(),
        drift=(comparable - memory.count_reachable_bytes(device)) / comparable if comparable else None,
    )


def build_observations(
    spec: RunSpec, series: Series, views: list[RankView], training: Training | None, **known: Any
) -> Observations:
    """Return the observations (measured values) of an attempt, which is one try at a run.

    `views` has the results of each rank, in the order of ranks. `known` has further fields of Observations that are
    already known.
    """
    seen = [view.seen for view in views if view.seen]
    around = [view.surrounded for view in views]
    counted = [rank.flops for rank in seen if rank.flops is not None]
    phases = dict.fromkeys(phase for rank in seen for phase in rank.step_phases_s)
    # Only the first steps of a training sum gradient norms in fp64. The series of a resumed training lacks these steps.
    resumed = training is not None and any(one.kind == "load" for one in training.checkpoints)
    summed_norms = SUMMED_STEPS if facts(spec).sums_norms and not resumed else 0
    has_energy = any(one.energy_j is not None for one in around)
    return Observations(
        **known,
        phases_s={name: max(view.phases_s.get(name, 0.0) for view in views) for name in views[0].phases_s},
        steps=reduce_steps(series).model_copy(update={"summed_norms": summed_norms}),
        tokens=count_tokens(spec, series),
        memory=tuple(view.memory for view in views),
        collectives=_select_heaviest(seen) if seen else None,
        outside_collectives_s=tuple(rank.outside_collectives_s for rank in seen),
        # 0 on a rank without the phase
        step_phases_s={phase: tuple(rank.step_phases_s.get(phase, 0.0) for rank in seen) for phase in phases} or None,
        idle_s=tuple(rank.idle_s for rank in seen) if any(rank.idle_s is not None for rank in seen) else None,
        passes=select_passes(spec, seen),
        counted_flops=sum(counted) if len(counted) == spec.world_size else None,  # only if all ranks are real
        load=tuple(one.load for one in around if one.load) or None,
        device_use=tuple(one.use for one in around if one.use) or None,
        energy_j=tuple(one.energy_j for one in around) if has_energy else (),
        energy_s=tuple(one.energy_s for one in around) if has_energy else None,
        evaluations=tuple(training.evaluations) if training else None,
        checkpoints=tuple(training.checkpoints) or None if training else None,
    )


def select_passes(spec: RunSpec, seen: list[Inspection]) -> tuple[tuple[TimedPass, ...], ...] | None:
    """Return the timed forward and backward passes of the first rank at each pipeline position. None if there are no
    passes, or more than MOST_PASSES."""
    # Ranks at the same pipeline position have consecutive numbers.
    firsts = seen[:: spec.world_size // spec.parallel.pipeline] if len(seen) == spec.world_size else []
    number = sum(len(rank.passes) for rank in firsts)
    return tuple(tuple(rank.passes) for rank in firsts) if 0 < number <= MOST_PASSES else None


def drop_unknown(observed: Observations, *, computes: bool) -> Observations:
    """Return the observations of a rehearsal without the values that a rehearsal cannot measure.

    In a rehearsal one rank runs alone, without its peers. Losses are removed, because they are meaningless. Step times
    are removed, because they contain no communication. Exception: if the rehearsal executes all computation
    (`computes`), the step times of the window are kept as the field `compute_s`.
    """
    assert observed.steps
    compute_s = observed.steps.step_s[observed.steps.cut :] if computes else ()
    unknown = dict.fromkeys(("steps", "tokens", "step_phases_s", "idle_s", "passes"))
    return observed.model_copy(update={**unknown, "outside_collectives_s": (), "compute_s": compute_s})


def reduce_steps(series: Series) -> Steps:
    """Return the steps of the whole run with one value per step for all ranks together. Examples are the step time, the
    longest wait for data, and the mean loss over ranks.

    A step lasts from the time when the slowest rank completed the previous step to the time when the slowest rank
    completed this step.
    """
    norms, own_s = series.column("gradient_norm"), series.column("step_s")  # (steps, ranks) each
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
    """Return the outcome `ok`; or `invalid` with the first step whose loss or gradient norm is not finite."""
    if series.stopped != "invalid":
        return Outcome(kind="ok")
    finite = {
        "loss": series.losses.isfinite().all(dim=1),
        "gradient norm": ~series.column("gradient_norm").isinf().any(dim=1),
    }
    step, what = min((int((~good).nonzero()[0]), name) for name, good in finite.items() if not good.all())
    return Outcome(kind="invalid", reason=f"{what} is not finite at step {step}", evidence={"step": step, "what": what})


def count_tokens(spec: RunSpec, series: Series) -> Tokens | None:
    """Return the number of tokens and padding tokens per optimizer step, averaged over the window.

    None if there is no valid window of timed steps, or if the run has only some of the ranks (a rehearsal runs one rank
    alone).
    """
    if len(series.ranks) <= series.warmup or series.stopped == "invalid" or len(series.ranks[0]) != spec.world_size:
        return None
    padding = {}
    for kind in spec.sequence:
        counted = series.column(f"{kind}_padding")[series.warmup :]  # (steps, ranks)
        by_place = counted.reshape(len(counted), spec.parallel.pipeline, spec.data_parallel, spec.parallel.tensor)
        # Ranks that share samples have the same counts, or none if they read no data.
        padding[kind] = float(by_place.amax(dim=(1, 3)).sum(dim=1).mean())
    tokens = {kind: float(spec.global_batch * length) for kind, length in spec.sequence.items()}
    return Tokens.counted(tokens, padding)


def write_steps_table(series: Series) -> bytes:
    """Return the steps of every rank as a Parquet file.

    The columns are step, rank, window (True if the step is in the window) and all columns of `Series`.
    """
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
    """Return an Arrow column without missing values, built from the bytes of a NumPy array.

    `pa.array` is not used, because it would import pandas, which takes half a second.
    """
    stored = np.packbits(values, bitorder="little") if values.dtype == bool else np.ascontiguousarray(values)
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(stored)])


def _replace_infinite(values: torch.Tensor) -> tuple[float | None, ...]:
    return tuple(value if math.isfinite(value) else None for value in values.tolist())


def _select_heaviest(ranks: list[Inspection]) -> dict[str, Collective]:
    """Return the calls and payload bytes of each kind of collective. The values of a kind are those of the rank with
    the most payload bytes of this kind.

    Ranks differ in payload bytes if their partitions have different sizes.
    """
    kinds = sorted({kind for rank in ranks for kind in rank.collectives})
    return {
        kind: max((rank.collectives[kind] for rank in ranks if kind in rank.collectives), key=lambda c: c.payload_bytes)
        for kind in kinds
    }
