"""Values of a record that several metrics and flags need, such as its timed window, its slowest rank and its rate of
FLOPs.

Each function returns None if the record lacks the data from which the value is computed.
"""

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar, cast

from analysis.stats.intervals import SHARES, Interval, describe_window
from bench.core.errors import NoPrediction, UserError
from bench.core.quantities import find_slow_links, find_slow_ranks
from bench.core.record import Environment, RunRecord, ScheduledJob, Steps, Tokens
from bench.predict.work import compute_flops_per_step

FlopsKind = Literal["model", "hardware"]
""""model": FLOPs that the model needs. "hardware": all executed FLOPs, including recomputation of activations."""
_TERA = 1e12

Given = TypeVar("Given")
Found = TypeVar("Found")


class TimedWindow(NamedTuple):
    """The timed steps of a run, after warm-up."""

    step_s: tuple[float, ...]
    data_wait_s: tuple[float, ...]
    seconds: float  # duration of the whole window


def remember_latest(work: Callable[[Given], Found]) -> Callable[[Given], Found]:
    """Return a function that caches the result of `work` for the latest argument. The cache helps because most columns
    of a record need the same values, and the columns of one record are computed one after another.

    Arguments are compared by identity, because comparing their contents would take longer than `work`.
    """
    latest: tuple[Any, Any] = object(), None  # the latest argument, and the result for it

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
    """Return the timed steps of a run, which follow its warm-up steps; None unless the run ended ok.

    A run that diverged or stopped early did not do the work of its configuration, so its times are not used.
    """
    steps = record.observations.steps if record.observations else None
    if record.outcome.kind != "ok" or steps is None or steps.cut >= len(steps.step_s) or steps.window_s <= 0:
        return None
    return _drop_warmup(steps)


@remember_latest  # also gives a copied record the same tuples, for a fast lookup in `describe_window`
def _drop_warmup(steps: Steps) -> TimedWindow:
    return TimedWindow(steps.step_s[steps.cut :], steps.data_wait_s[steps.cut :], steps.window_s)


@remember_latest
def find_job(environment: Environment | None) -> ScheduledJob | None:
    """Return the scheduler job in which a run was executed; None outside of any job."""
    if environment is None or environment.job or not environment.slurm:
        return environment.job if environment else None
    reported = environment.slurm  # older records have only the environment variables of Slurm
    return ScheduledJob(
        job_id=reported.get("SLURM_JOB_ID", ""),
        cluster=reported.get("SLURM_CLUSTER_NAME", ""),
        restart=int(reported.get("SLURM_RESTART_COUNT", 0)),
        nodelist=reported.get("SLURM_JOB_NODELIST", ""),
    )


@remember_latest
def compute_steps_per_s(record: RunRecord) -> float | None:
    """Return the steps per second over the timed window: the number of its steps divided by its duration. This differs
    from the mean of the rates of single steps."""
    timed = get_window(record)
    return len(timed.step_s) / timed.seconds if timed else None


def compute_step_quantile(record: RunRecord, share: float) -> float | None:
    """Return a quantile of the step times of the timed window, in seconds, interpolated between two steps. `share` is
    one of SHARES, such as 0.95 for the 95th percentile."""
    timed = get_window(record)
    return describe_window(timed.step_s).quantiles[SHARES.index(share)] if timed else None


def compute_step_interval(record: RunRecord) -> Interval | None:
    """Return the confidence interval of the median step time, in seconds, computed from the steps of the run alone."""
    timed = get_window(record)
    return describe_window(timed.step_s).median if timed else None


def get_tokens(record: RunRecord) -> Tokens | None:
    """Return the tokens per optimizer step, counted in the timed window after warm-up; None if this window has no
    steps."""
    observed = record.observations
    if observed is None or observed.steps is None or observed.steps.cut >= len(observed.steps.step_s):
        return None
    return observed.tokens


def compute_token_rate(record: RunRecord, counted: Callable[[Tokens], float | None]) -> float | None:
    """Return tokens per second over all ranks and the whole window. `counted` takes the tokens of a step and returns
    the number of tokens to count, such as the encoder tokens."""
    rate, per_step = compute_steps_per_s(record), get_tokens(record)
    selected = None if per_step is None else counted(per_step)
    return None if rate is None or selected is None else rate * selected


def compute_energy_j(record: RunRecord) -> float | None:
    """Return the energy of all devices over the timed window, in joules; None unless every device reported its energy.

    The reported energy includes the pauses between blocks of timed steps. If the duration of the energy measurement is
    known, the energy is scaled to the duration of the window.
    """
    observed, timed = record.observations, get_window(record)
    if observed is None or timed is None:
        return None
    durations = observed.energy_s or (None,) * len(observed.energy_j)
    known = [
        energy if over is None or over <= 0 else energy / over * timed.seconds
        for energy, over in zip(observed.energy_j, durations, strict=True)
        if energy is not None
    ]
    return sum(known) if len(known) == record.spec.world_size else None


def find_worst_rank_value(record: RunRecord, quantity: str) -> int | None:
    """Return the maximum over ranks of a field of RankMemory; None if the field is unknown for at least one rank."""
    return max(list_by_rank(record, quantity), default=None)


def list_by_rank(record: RunRecord, quantity: str) -> tuple[int, ...]:
    """Return the value of a field of RankMemory for every rank; empty if the field is unknown for at least one rank."""
    ranks = record.observations.memory if record.observations else ()
    values = tuple(map(attrgetter(quantity), ranks))  # a generator would be slower, and there may be many ranks
    return () if None in values else values


def list_own_seconds(record: RunRecord) -> tuple[float, ...]:
    """Return the seconds per step that each rank spends outside collectives; empty unless known for all ranks."""
    observed = record.observations
    if observed is None or record.outcome.kind != "ok":
        return ()
    ranks = observed.outside_collectives_s
    return ranks if len(ranks) == record.spec.world_size else ()


@remember_latest
def find_slowest_rank(record: RunRecord) -> int | None:
    """Return the slowest rank if it is a straggler, which is a rank that is much slower than the others (by the rule in
    `bench.core.quantities`); None if no rank is a straggler."""
    own = list_own_seconds(record)
    return max(find_slow_ranks(own, record.spec.parallel.pipeline), key=own.__getitem__, default=None)


def find_slowest_link(record: RunRecord) -> int | None:
    """Return the index of the node with the slowest link, if that link is much slower than the others (by the rule in
    `bench.core.quantities`); None if no link is much slower."""
    link = record.observations.link if record.observations else None
    rates = link.nodes_bytes_per_s if link else ()
    return min(find_slow_links(rates), key=lambda node: rates[node] or 0.0, default=None)


def get_host(record: RunRecord, node: int) -> str | None:
    """Return the host name of a node; None if host names are unknown or two nodes have the same name."""
    hosts = record.environment.hosts if record.environment else ()
    return hosts[node] if len(hosts) == record.spec.nodes else None


def compute_tflops_per_device(record: RunRecord, kind: FlopsKind) -> float | None:
    """Return the rate of matmul FLOPs per device over the timed window (steps after warm-up), in 10^12 FLOP/s."""
    rate = compute_steps_per_s(record)
    flops = None if rate is None else compute_step_flops(record, kind)
    return None if rate is None or flops is None else flops * rate / record.spec.world_size / _TERA


_compute_step_flops = remember_latest(compute_flops_per_step)


def compute_step_flops(record: RunRecord, kind: FlopsKind) -> int | None:
    """Return the matmul FLOPs of a step over all ranks. The number comes from a formula or, for a model family without
    a formula, from torch's FLOP counter.

    The counter cannot exclude recomputed activations. So with activation checkpointing, it gives no "model" FLOPs, and
    None is returned.
    """
    try:
        flops: int = getattr(_compute_step_flops(record.spec), kind)
    except NoPrediction:
        counted = record.observations.counted_flops if record.observations else None
        return counted if kind == "hardware" or not record.spec.activation_checkpointing else None
    except (UserError, ValueError):  # this version does not know the model family or the shape
        return None
    return flops


def compute_utilisation(record: RunRecord, kind: FlopsKind) -> float | None:
    """Return `compute_tflops_per_device` divided by the device's dense peak in the precision of the run; None if the
    peak is unknown."""
    rate = compute_tflops_per_device(record, kind)
    peak = record.circumstance.machine.peak_tflops.get(record.spec.precision)
    return None if rate is None or not peak else rate / peak
