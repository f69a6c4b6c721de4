"""Quantities of a run, from its record: step time with its interval, samples and tokens per second and node, memory.

Also the rules by which a run's machine counts as busy, and by which a rank or a node's network counts as slow. None is
unknown.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Sequence
from typing import Literal, NamedTuple

from bench.core.record import NodeLoad, Observations, RunRecord
from bench.core.spec import RunSpec

QUANTITIES = (
    "step_s",
    "samples_per_s",
    "tokens_per_s",
    "samples_per_node_hour",
    "peak_bytes",
    "loss",
    "validation_loss",
)
"""What a run is measured by; `peak_bytes` are live tensors of the rank that holds most, `loss` the mean of the last
steps of the window, `validation_loss` that of the held-out text at the end of a training."""
OBJECTIVES: dict[str, Literal["most", "least"]] = {
    "samples_per_s": "most",
    "tokens_per_s": "most",
    "samples_per_node_hour": "most",
    "step_s": "least",
    "peak_bytes": "least",
    "validation_loss": "least",
}
"""What can be sought, and which way; all of them are above 0."""
_TIMELESS = ("peak_bytes", "loss", "validation_loss")
_LAST_STEPS = 5
_BUSY_NOISE = 0.3
"""Deviation in log of the step time of a run whose machine was busy: by a third in either direction."""
_UNKNOWN_NOISE = 0.3
"""The same of a run with too few steps for an interval."""
_UNSTEADY_NOISE = 0.1
"""The same of a run that was timed before its steps were steady."""
_DEVIATIONS = 1.96
"""That an interval of 95 % reaches to either side."""
_LEAST_NOISE = 0.025
"""What a narrower interval adds is left out: two sound runs of one point differ by as much."""


class RunQuantities(NamedTuple):
    """A run that ended well; its interval is of its step, at 95 %, and knows this run alone."""

    step_s: float
    low_s: float | None
    high_s: float | None
    samples: int  # of a step
    tokens: float | None  # of a step, padding included
    nodes: int
    peak_bytes: int | None
    loss: float | None
    ended_early: bool = False  # its steps were surely longer than those of a search's best
    validation_loss: float | None = None
    step_noise: float = 0.0  # deviation in log of the step time, beyond that between two sound runs

    def noise(self, name: str) -> float:
        """Return the deviation in log of a quantity, beyond that between two sound runs."""
        return 0.0 if name in _TIMELESS else self.step_noise

    def get(self, name: str) -> float | None:
        """Return one of `QUANTITIES`."""
        if name in _TIMELESS:
            value: float | None = getattr(self, name)
            return value
        return self._of_time(name, self.step_s)

    def interval(self, name: str) -> tuple[float, float] | None:
        """Return the interval of a quantity that follows from the time of a step, with the noise of a run that is no
        sound measurement; None where there is none."""
        if name in _TIMELESS:
            return None
        low_s, high_s = self.low_s, self.high_s
        if self.step_noise:
            reach = math.exp(_DEVIATIONS * self.step_noise)
            low_s, high_s = self.step_s / reach, self.step_s * reach
        if low_s is None or high_s is None:
            return None
        one, other = self._of_time(name, low_s), self._of_time(name, high_s)
        return None if one is None or other is None else (min(one, other), max(one, other))

    def _of_time(self, name: str, step_s: float) -> float | None:
        work = compute_work(name, self.samples, self.tokens, self.nodes)
        return None if work is None else (step_s if name == "step_s" else work / step_s)


def compute_work(name: str, samples: int, tokens: float | None, nodes: int) -> float | None:
    """Return what a quantity counts in one step, so that the quantity is this by the step's seconds; None of one that
    does not follow from them."""
    if name in _TIMELESS:
        return None
    if name == "samples_per_node_hour":
        return 3600 * samples / nodes
    return {"step_s": 1.0, "samples_per_s": float(samples), "tokens_per_s": tokens}[name]


def predict_quantity(name: str, spec: RunSpec, step_s: float | None, peak_bytes: int | None) -> float | None:
    """Return a quantity as predicted from the time of a step and from memory."""
    if name == "peak_bytes":
        return peak_bytes
    if name in _TIMELESS or step_s is None:
        return None
    if name == "step_s":
        return step_s
    tokens = float(spec.global_batch * spec.tokens_per_sample)
    work = compute_work(name, spec.global_batch, tokens, spec.nodes)
    return None if work is None else work / step_s


def derive_quantities(record: RunRecord) -> RunQuantities | None:
    """Return what a run comes to; None unless it was measured and ended well."""
    observed = record.observations
    if record.outcome.kind != "ok" or observed is None or observed.steps is None or observed.drill:
        return None
    window = observed.steps.step_s[observed.steps.cut :]
    if not window:
        return None
    from bench.core.statistics import series_interval  # which takes as long as importing scipy

    interval = series_interval(window)
    peaks = [rank.peak_allocated_bytes for rank in observed.memory if rank.peak_allocated_bytes is not None]
    losses = [loss for loss in observed.steps.loss[-_LAST_STEPS:] if loss is not None and math.isfinite(loss)]
    return RunQuantities(
        step_s=statistics.median(window),
        low_s=interval[0] if interval else None,
        high_s=interval[1] if interval else None,
        samples=record.spec.global_batch,
        tokens=observed.tokens.all if observed.tokens else None,
        nodes=record.spec.nodes,
        peak_bytes=max(peaks, default=None),
        loss=statistics.mean(losses) if losses else None,
        ended_early=observed.steps.stopped == "slower",
        validation_loss=observed.evaluations[-1].loss if observed.evaluations else None,
        step_noise=_estimate_step_noise(observed, window, interval),
    )


def _estimate_step_noise(
    observed: Observations, window: Sequence[float], interval: tuple[float, float] | None
) -> float:
    """Return how far the step time of a run may be off, as a deviation in log; 0 for a sound run."""
    assert observed.steps
    of_steps = _UNKNOWN_NOISE if interval is None else math.log(interval[1] / interval[0]) / (2 * _DEVIATIONS)
    found = [of_steps if of_steps > _LEAST_NOISE else 0.0]
    found += [_UNSTEADY_NOISE] * (not observed.steps.steady)
    found += [_BUSY_NOISE] * is_busy(observed, sum(window))
    return math.hypot(*found)


def compute_node_hours(record: RunRecord) -> float | None:
    """Return the node-hours from a run's start to its last step; None of one that says nothing of its time."""
    observed = record.observations
    if observed is None:
        return None
    seconds = sum(observed.phases_s.values()) + (sum(observed.steps.step_s) if observed.steps else 0.0)
    return record.spec.nodes * seconds / 3600 if seconds else None


BUSY_SHARE = 0.05
"""Of the time of all cores that the run may use: its steps are 5 % longer, as configurations differ."""
PRESSURE_SHARE = 0.05
"""Of the window: some task, perhaps the run's own, waited for memory, or for input and output."""
FOREIGN_BYTES = 2**28
"""Device memory above which another process counts as background load. A display server uses less."""


def taken(load: NodeLoad) -> float | None:
    """Return the share of a node's cores that others had, the hypervisor's other guests too; None where unknown."""
    known = [share for share in (load.others_share, load.stolen_share) if share is not None]
    return sum(known) if known else None


def is_busy(observed: Observations, window_s: float) -> bool:
    """Whether background load, waits for memory or for input and output, a quota or another process on a device
    mattered on any node during the window, or whether the record was marked so by a person afterwards."""
    if observed.known_busy is not None:
        return True
    for load in observed.load or ():
        if (taken(load) or 0.0) > BUSY_SHARE or (load.throttled_s or 0.0) > BUSY_SHARE * window_s:
            return True
        if max(load.memory_pressure_share or 0.0, load.io_pressure_share or 0.0) > PRESSURE_SHARE:
            return True
    return any(
        use.other_processes and (use.other_bytes is None or use.other_bytes >= FOREIGN_BYTES)
        for use in observed.device_use or ()
    )


_SLOWER, _LATER_S = 1.2, 0.02  # below 20 ms the operating system alone makes ranks differ
_SLOW_LINK = 0.5


def find_slow_ranks(outside_s: Sequence[float], parts: int = 1) -> list[int]:
    """Return the ranks whose own time in a step, outside its collectives, exceeds the others' median (the larger of two
    middle ones) by more than 20 % and by more than 20 ms. Others are those with the same of so many `parts` of the
    layers, which stand next to each other: another part is other work."""
    alike = len(outside_s) // parts or 1
    firsts = range(0, len(outside_s), alike)
    return [first + rank for first in firsts for rank in _find_slow_alike(outside_s[first : first + alike])]


def compare_to_alike(values: Sequence[float], parts: int = 1) -> list[tuple[float, float]]:
    """Return each rank's value with the median of the ranks that have the same of so many `parts` of the layers."""
    alike = len(values) // parts or 1
    medians = [statistics.median(values[first : first + alike]) for first in range(0, len(values), alike)]
    return [(own, medians[rank // alike]) for rank, own in enumerate(values)]


def _find_slow_alike(outside_s: Sequence[float]) -> list[int]:
    ordered, middle = sorted(outside_s), (len(outside_s) - 1) // 2
    found = []
    for rank, own in enumerate(outside_s if len(ordered) > 1 else ()):
        usual = ordered[middle + (bisect_left(ordered, own) <= middle)]  # the middle of all without this one
        if own > _SLOWER * usual and own > usual + _LATER_S:
            found.append(rank)
    return found


def find_slow_links(nodes_bytes_per_s: Sequence[float | None]) -> list[int]:
    """Return the nodes whose bandwidth is below half of the median; a node whose bandwidth is unknown is not judged."""
    known = [rate for rate in nodes_bytes_per_s if rate is not None]
    if not known:
        return []
    limit = _SLOW_LINK * statistics.median(known)
    return [node for node, rate in enumerate(nodes_bytes_per_s) if rate is not None and rate < limit]
