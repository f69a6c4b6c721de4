"""Quantities of a run, derived from its record: step time with its confidence interval, throughput, memory and loss.

This module also decides whether a machine was busy during a run, whether a rank is slow, and whether the network link
of a node is slow. None means that a quantity is unknown.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, NamedTuple

from bench.core.record import NodeLoad, Observations, RunRecord
from bench.core.spec import RunSpec

QUANTITIES = (
    "step_s", "samples_per_s", "tokens_per_s", "samples_per_node_hour", "peak_bytes", "loss", "validation_loss",
)  # fmt: skip
"""Names of a run's measured quantities.

`peak_bytes` is the peak of live tensor bytes on the rank with the highest peak. `loss` is the mean training loss of the
last five steps. `validation_loss` is the loss on held-out text at the end of a training.
"""
OBJECTIVES: dict[str, Literal["most", "least"]] = {
    "samples_per_s": "most",
    "tokens_per_s": "most",
    "samples_per_node_hour": "most",
    "step_s": "least",
    "peak_bytes": "least",
    "validation_loss": "least",
}
"""Quantities that a search can optimise, and whether a higher value ("most") or a lower value ("least") is better.
Their values are positive."""
LEAST_RUNS = 3
"""Minimum number of runs of each configuration for a comparison of configurations."""
_TIMELESS = ("peak_bytes", "loss", "validation_loss")
_LAST_STEPS = 5
# Standard deviations of the log of a step time whose measurement was disturbed.
_BUSY_NOISE = 0.3  # on a busy machine: a factor of 1.35 up or down
_UNKNOWN_NOISE = 0.3  # too few steps for an interval
_UNSTEADY_NOISE = 0.1  # measured before the step times were steady
DEVIATIONS = 1.96
"""Number of standard deviations on either side of a 95 % interval of a normal distribution."""
_LEAST_NOISE = 0.025  # smaller noise is ignored: two undisturbed runs of one point differ as much


class MeasuredStep(NamedTuple):
    """Mean or median step time of a run in seconds, with its 95 % interval. The interval is estimated from the steps of
    this run alone; None if there are too few steps."""

    s: float
    low_s: float | None = None
    high_s: float | None = None


class RunQuantities(NamedTuple):
    """Quantities of a run that ended well. As in the tables of `analysis`, throughputs follow from the mean step time,
    and `step_s` is the median."""

    mean: MeasuredStep
    median: MeasuredStep
    samples: int  # per step
    tokens: float | None  # per step, padding included
    nodes: int
    peak_bytes: int | None = None
    loss: float | None = None
    ended_early: bool = False  # a search stopped the run, because its steps were longer than the best trial's
    validation_loss: float | None = None
    step_noise: float = 0.0  # extra standard deviation of the log of the step time, due to disturbances

    def noise(self, name: str) -> float:
        """Return the standard deviation that disturbances add to the logarithm of a quantity; 0 for an undisturbed
        run."""
        return 0.0 if name in _TIMELESS else self.step_noise

    def get(self, name: str) -> float | None:
        """Return this run's value of the quantity `name`, such as `tokens_per_s` (see `QUANTITIES`); None if it is
        unknown."""
        if name in _TIMELESS:
            value: float | None = getattr(self, name)
            return value
        return self._of_time(name, self._select_time(name).s)

    def interval(self, name: str) -> tuple[float, float] | None:
        """Return the 95 % interval of a quantity that is computed from the step time, such as a throughput. None if the
        interval is unknown, or if the quantity does not depend on the step time. If the measurement was disturbed, the
        interval is widened by the extra noise."""
        step_s, low_s, high_s = self._select_time(name)
        if self.step_noise:
            factor = math.exp(DEVIATIONS * self.step_noise)
            low_s, high_s = step_s / factor, step_s * factor
        if name in _TIMELESS or low_s is None or high_s is None:
            return None
        one, other = self._of_time(name, low_s), self._of_time(name, high_s)
        return None if one is None or other is None else (min(one, other), max(one, other))

    def _select_time(self, name: str) -> MeasuredStep:
        return self.median if name == "step_s" else self.mean

    def _of_time(self, name: str, step_s: float) -> float | None:
        work = compute_work(name, self.samples, self.tokens, self.nodes)
        return None if work is None else (step_s if name == "step_s" else work / step_s)


def compute_work(name: str, samples: int, tokens: float | None, nodes: int) -> float | None:
    """Return the numerator of the throughput `name`. The denominator is the step time in seconds. For `samples_per_s`,
    for example, the numerator is the number of samples per step. Return None for a quantity that does not depend on the
    step time. `samples` and `tokens` are numbers per step."""
    if name in _TIMELESS:
        return None
    if name == "samples_per_node_hour":
        return 3600 * samples / nodes
    return {"step_s": 1.0, "samples_per_s": float(samples), "tokens_per_s": tokens}[name]


def predict_quantity(name: str, spec: RunSpec, step_s: float | None, peak_bytes: int | None) -> float | None:
    """Return the predicted value of a quantity; None if it is unknown. The value of `peak_bytes` is the predicted peak
    memory. Every other quantity is computed from `step_s`, the predicted step time."""
    if name == "peak_bytes":
        return peak_bytes
    if step_s is None or name == "step_s":
        return step_s
    tokens = float(spec.global_batch * spec.tokens_per_sample)
    work = compute_work(name, spec.global_batch, tokens, spec.nodes)
    return None if work is None else work / step_s


def derive_quantities(record: RunRecord) -> RunQuantities | None:
    """Return the quantities of a run; None if the run has no measurement window or did not end well."""
    observed = record.observations
    if record.outcome.kind != "ok" or observed is None or observed.steps is None or observed.drill:
        return None
    steps = observed.steps
    window = steps.step_s[steps.cut :]
    if not window:
        return None
    from bench.core.statistics import series_interval, series_mean_interval  # imported here: scipy is slow to import

    interval = series_mean_interval(window)
    # The rank with the highest peak decides whether a run fits.
    peaks = [rank.peak_allocated_bytes for rank in observed.memory if rank.peak_allocated_bytes is not None]
    losses = [loss for loss in steps.loss[-_LAST_STEPS:] if loss is not None and math.isfinite(loss)]
    of_interval = _UNKNOWN_NOISE if interval is None else math.log(interval[1] / interval[0]) / (2 * DEVIATIONS)
    noises = [
        of_interval if of_interval > _LEAST_NOISE else 0.0,
        _UNSTEADY_NOISE if steps.steady is False else 0.0,  # None in records of version 3, which do not test it
        _BUSY_NOISE if is_busy(observed, sum(window)) else 0.0,
    ]
    return RunQuantities(
        mean=MeasuredStep(statistics.fmean(window), *(interval or ())),
        median=MeasuredStep(statistics.median(window), *(series_interval(window) or ())),
        samples=record.spec.global_batch,
        tokens=observed.tokens.all if observed.tokens else None,
        nodes=record.spec.nodes,
        peak_bytes=max(peaks, default=None),
        loss=statistics.mean(losses) if losses else None,
        ended_early=steps.stopped == "slower",
        validation_loss=observed.evaluations[-1].loss if observed.evaluations else None,
        step_noise=math.hypot(*noises),
    )


def compute_node_hours(record: RunRecord) -> float | None:
    """Return the node-hours of a run, from its start to its last step; None if the record has no times."""
    observed = record.observations
    if observed is None:
        return None
    seconds = sum(observed.phases_s.values()) + (sum(observed.steps.step_s) if observed.steps else 0.0)
    return record.spec.nodes * seconds / 3600 if seconds else None


BUSY_SHARE = 0.05
"""Share of a node's core time above which background load makes the node busy. At this share, steps take about 5 %
longer, and the differences between configurations may be as small as that."""
PRESSURE_SHARE = 0.05
"""Share of the measurement window in which processes may wait for memory, or for input and output. Above it, the
machine counts as busy. Waits of the run itself count, too."""
FOREIGN_BYTES = 2**28
"""Device memory in bytes above which another process counts as background load. A display server uses less."""


def compute_background_load(load: NodeLoad) -> float | None:
    """Return the share of a node's core time that other processes or other guests of the hypervisor used; None if
    unknown."""
    known = [share for share in (load.others_share, load.stolen_share) if share is not None]
    return sum(known) if known else None


def explain_busy_node(load: NodeLoad, window_s: float) -> str:
    """Return why a node was busy during a window of `window_s` seconds; empty if it was not busy."""
    background = compute_background_load(load) or 0.0
    if background > BUSY_SHARE:
        return f"background load takes {100 * background:.0f} % of its cores"
    if (load.throttled_s or 0.0) > BUSY_SHARE * window_s:
        return "a CPU quota (control group) stops its processes"
    # Pressure on cores is ignored, because the ranks themselves may cause it.
    for what, share in (("memory", load.memory_pressure_share), ("input and output", load.io_pressure_share)):
        if (share or 0.0) > PRESSURE_SHARE:
            return f"processes wait for {what} for {100 * (share or 0.0):.0f} % of the time"
    return ""


def is_busy(observed: Observations, window_s: float) -> bool:
    """Return True if any node was busy during the window of `window_s` seconds.

    A node was busy if one of these values is too high: its background load; the time for which processes wait for
    memory, or for input and output; the time for which the CPU quota of a control group stops processes. A node was
    also busy if another process used much memory of a device (`FOREIGN_BYTES`). A user's note in the record that the
    machine was busy also counts.
    """
    if observed.known_busy is not None:
        return True
    if any(explain_busy_node(load, window_s) for load in observed.load or ()):
        return True
    return any(
        use.other_processes and (use.other_bytes is None or use.other_bytes >= FOREIGN_BYTES)
        for use in observed.device_use or ()
    )


def may_cause_busy(record: RunRecord) -> bool:
    """Return True if a run was busy by no other signs than those that the run itself may have caused: waits for memory
    or for input and output, and a CPU quota."""
    observed = record.observations
    if observed is None or not was_busy(record):
        return False
    own = {"throttled_s": None, "memory_pressure_share": None, "io_pressure_share": None}
    loads = tuple(load.model_copy(update=own) for load in observed.load or ())
    return not is_busy(observed.model_copy(update={"load": loads}), 0.0)


def was_busy(record: RunRecord) -> bool:
    """Return True if any node was busy during the measurement window of a run. False for a run without a window."""
    observed = record.observations
    return observed is not None and observed.steps is not None and is_busy(observed, observed.steps.window_s)


_SLOWER, _LATER_S = 1.2, 0.02  # differences below 20 ms may come from the operating system
_SLOW_LINK = 0.5


def find_slow_ranks(outside_s: Sequence[float], parts: int = 1) -> list[int]:
    """Return the ranks that spend far more time outside collectives than the other ranks of the same pipeline part.
    `outside_s` is this time in seconds per step, by rank.

    `parts` is the number of pipeline parts. The ranks of one part have the same work and successive numbers. Far more
    means both 20 % and 20 ms above the median of the other ranks of the part. If the number of these other ranks is
    even, the larger of the two middle values counts as the median.
    """
    alike = len(outside_s) // parts or 1
    found = []
    for first in range(0, len(outside_s), alike):
        group = outside_s[first : first + alike]
        ordered, middle = sorted(group), (len(group) - 1) // 2
        for rank, own in enumerate(group if len(group) > 1 else ()):
            usual = ordered[middle + (bisect_left(ordered, own) <= middle)]  # the median without this rank
            if own > _SLOWER * usual and own > usual + _LATER_S:
                found.append(first + rank)
    return found


def compare_to_alike(values: Sequence[float], parts: int = 1) -> list[tuple[float, float]]:
    """Return, for each rank, its own value and the median value of all ranks that have the same part of a pipeline.
    `parts` is the number of pipeline parts."""
    alike = len(values) // parts or 1
    medians = [statistics.median(values[first : first + alike]) for first in range(0, len(values), alike)]
    return [(own, medians[rank // alike]) for rank, own in enumerate(values)]


def find_slow_links(nodes_bytes_per_s: Sequence[float | None]) -> list[int]:
    """Return the nodes with less than half of the median bandwidth. Unknown bandwidths (None) are ignored."""
    known = [rate for rate in nodes_bytes_per_s if rate is not None]
    limit = _SLOW_LINK * statistics.median(known) if known else 0.0
    return [node for node, rate in enumerate(nodes_bytes_per_s) if rate is not None and rate < limit]
