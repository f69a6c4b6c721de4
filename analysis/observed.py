"""What the metrics read in a record: its timed window, worst and slowest rank, rate of FLOPs; None where it does not
tell."""

import functools
import operator
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np

from analysis.stats import intervals
from analysis.stats.intervals import Interval, rate_interval
from bench.core.errors import NoPrediction, UserError
from bench.core.quantities import find_slow_links, find_slow_ranks
from bench.core.record import Environment, RankMemory, RunRecord, ScheduledJob, Steps, Tokens
from bench.predict.work import compute_flops_per_step

_TERA = 1e12

Given = TypeVar("Given")
Found = TypeVar("Found")


class TimedWindow(NamedTuple):
    """The timed steps of a run."""

    step_s: tuple[float, ...]
    data_wait_s: tuple[float, ...]
    seconds: float  # all of them together


def remember_latest(work: Callable[[Given], Found]) -> Callable[[Given], Found]:
    """Keep what `work` returned for the last value, for most columns of a record ask for the same; the value is known
    by what it is and not by what it holds, which would take longer to compare than `work` takes."""
    latest: tuple[Any, Any] = object(), None  # a value, and what was returned for it

    @functools.wraps(work)
    def find(given: Given) -> Found:
        nonlocal latest
        known, found = latest
        if known is not given:
            found = work(given)
            latest = given, found
        return cast(Found, found)

    return find


@remember_latest
def get_window(record: RunRecord) -> TimedWindow | None:
    """Return the steps whose time may be shown: those after the cut, of a run that ended well.

    A run that diverged or was stopped half-way computed something else than what was asked, so its speed is no answer.
    """
    steps = record.observations.steps if record.observations else None
    if record.outcome.kind != "ok" or steps is None or steps.cut >= len(steps.step_s) or steps.window_s <= 0:
        return None
    return _cut_warmup(steps)


@remember_latest
def _cut_warmup(steps: Steps) -> TimedWindow:
    return TimedWindow(steps.step_s[steps.cut :], steps.data_wait_s[steps.cut :], steps.window_s)


@remember_latest
def find_job(environment: Environment | None) -> ScheduledJob | None:
    """Return the scheduler's job that a run was in, None where it was in none. Older records tell it by the variables
    of Slurm alone."""
    if environment is None or environment.job or not environment.slurm:
        return environment.job if environment else None
    reported = environment.slurm
    return ScheduledJob(
        job_id=reported.get("SLURM_JOB_ID", ""),
        cluster=reported.get("SLURM_CLUSTER_NAME", ""),
        restart=int(reported.get("SLURM_RESTART_COUNT", 0)),
        nodelist=reported.get("SLURM_JOB_NODELIST", ""),
    )


@remember_latest
def compute_steps_per_s(record: RunRecord) -> float | None:
    """Return the steps of the window divided by its seconds: the whole window, never a mean of rates."""
    timed = get_window(record)
    return len(timed.step_s) / timed.seconds if timed else None


def compute_step_quantile(record: RunRecord, share: float) -> float | None:
    """Return the step time that a share of the window's steps stay below, interpolated between two of them."""
    timed = get_window(record)
    if timed is None:
        return None
    if share in intervals.SHARES:
        return intervals.describe_window(timed.step_s).quantiles[intervals.SHARES.index(share)]
    return float(np.quantile(timed.step_s, share))


def compute_step_interval(record: RunRecord) -> Interval | None:
    """Return the interval of the median step time, from the run's own steps."""
    timed = get_window(record)
    return intervals.describe_window(timed.step_s).median if timed else None


def compute_rate_interval(record: RunRecord, rate: float | None) -> Interval | None:
    """Return the interval of a rate over the window, from the run's own steps; None where the rate is."""
    timed = get_window(record)
    return (
        rate_interval(intervals.describe_window(timed.step_s).mean, timed.step_s, rate)
        if timed and rate is not None
        else None
    )


def get_tokens(record: RunRecord) -> Tokens | None:
    """Return the tokens that were counted in the window, per optimizer step; None where no step was in it."""
    observed = record.observations
    if observed is None or observed.steps is None or observed.steps.cut >= len(observed.steps.step_s):
        return None
    return observed.tokens


def compute_token_rate(record: RunRecord, counted: Callable[[Tokens], float | None]) -> float | None:
    """Return tokens per second over all ranks and the whole window; `counted` picks them from those of a step, None
    where there are none such."""
    rate, per_step = compute_steps_per_s(record), get_tokens(record)
    picked = None if per_step is None else counted(per_step)
    return None if rate is None or picked is None else rate * picked


def compute_energy_j(record: RunRecord) -> float | None:
    """Return what all devices used over the window; None unless every one told. What was read includes the pauses
    between blocks: where its own seconds are known, it is the power over them for the seconds of the window."""
    observed, timed = record.observations, get_window(record)
    if observed is None or timed is None:
        return None
    seconds = observed.energy_s or (None,) * len(observed.energy_j)
    known = [
        energy if over is None or over <= 0 else energy / over * timed.seconds
        for energy, over in zip(observed.energy_j, seconds, strict=True)
        if energy is not None
    ]
    return sum(known) if len(known) == record.spec.world_size else None


def find_worst_rank_value(record: RunRecord, quantity: str) -> int | None:
    """Return the largest of all ranks' `quantity`, a field of RankMemory; None where one of them is unknown."""
    return max(list_by_rank(record, quantity), default=None)


def list_by_rank(record: RunRecord, quantity: str) -> tuple[int, ...]:
    """Return every rank's `quantity`, a field of RankMemory; empty where one of them is unknown."""
    return _list_memory(record.observations.memory)(quantity) if record.observations else ()


@remember_latest
def _list_memory(ranks: tuple[RankMemory, ...]) -> Callable[[str], tuple[int, ...]]:
    @functools.cache
    def list_quantity(name: str) -> tuple[int, ...]:
        values = tuple(map(operator.attrgetter(name), ranks))
        return () if None in values else values

    return list_quantity


def list_own_seconds(record: RunRecord) -> tuple[float, ...]:
    """Return each rank's own seconds in a step, outside its collectives; empty unless all ranks' are known."""
    observed = record.observations
    if observed is None or record.outcome.kind != "ok":
        return ()
    ranks = observed.outside_collectives_s
    return ranks if len(ranks) == record.spec.world_size else ()


def find_slowest_rank(record: RunRecord) -> int | None:
    """Return the rank that the others wait for most, if one stands out (`bench.core.quantities`)."""
    return _find_slowest(list_own_seconds(record), record.spec.parallel.pipeline)


def find_slowest_link(record: RunRecord) -> int | None:
    """Return the node whose link is the slowest, if one stands out (`bench.core.quantities`)."""
    link = record.observations.link if record.observations else None
    rates = link.nodes_bytes_per_s if link else ()
    return min(find_slow_links(rates), key=lambda node: rates[node] or 0.0, default=None)


def get_host(record: RunRecord, node: int) -> str | None:
    """Return the host name of a node; None where hosts are unknown, or share a name."""
    hosts = record.environment.hosts if record.environment else ()
    return hosts[node] if len(hosts) == record.spec.nodes else None


def compute_tflops_per_device(record: RunRecord, kind: Literal["model", "hardware"]) -> float | None:
    """Return 10^12 matmul FLOP/s per device over the window; `hardware` counts recomputed activations as well."""
    rate = compute_steps_per_s(record)
    if rate is None:
        return None
    flops = compute_step_flops(record, kind)
    return None if flops is None else flops * rate / record.spec.world_size / _TERA


def compute_step_flops(record: RunRecord, kind: Literal["model", "hardware"]) -> int | None:
    """Return the matmul FLOPs of a step over all ranks by their formula or, where the family describes no network, as
    they were counted, which cannot tell recomputed activations apart; None where neither says it."""
    try:
        flops: int = getattr(_compute_step_flops(record.spec), kind)
    except NoPrediction:
        counted = record.observations.counted_flops if record.observations else None
        return counted if kind == "hardware" or not record.spec.activation_checkpointing else None
    except (UserError, ValueError):  # a family or a shape that this version does not know
        return None
    return flops


def compute_utilisation(record: RunRecord, kind: Literal["model", "hardware"]) -> float | None:
    """Return `compute_tflops_per_device` divided by the dense peak in the run's precision; None for no known peak."""
    rate, peak = (
        compute_tflops_per_device(record, kind),
        record.circumstance.machine.peak_tflops.get(record.spec.precision),
    )
    return None if rate is None or not peak else rate / peak


_compute_step_flops = remember_latest(compute_flops_per_step)


@functools.lru_cache(maxsize=8)  # several columns of a record ask for it, one soon after the other
def _find_slowest(own: tuple[float, ...], parts: int) -> int | None:
    return max(find_slow_ranks(own, parts), key=own.__getitem__, default=None)
