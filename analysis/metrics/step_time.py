"""Step times of the window, which are the timed steps after warm-up. A step takes as long as its slowest rank."""

import statistics

from analysis.metrics import Metric, build_interval_ends, build_metric
from analysis.observed import compute_step_interval, compute_step_quantile, get_window
from bench.core.record import RunRecord


def count_steps(record: RunRecord) -> int | None:
    """Return the number of optimizer steps in the timed window, which is the part of the run after warm-up."""
    timed = get_window(record)
    return len(timed.step_s) if timed else None


def compute_step_s(record: RunRecord) -> float | None:
    """Return the median time of an optimizer step in the timed window, in seconds."""
    timed = get_window(record)
    return statistics.median(timed.step_s) if timed else None


def compute_step_s_max(record: RunRecord) -> float | None:
    """Return the time of the longest step of the timed window, in seconds."""
    timed = get_window(record)
    return max(timed.step_s) if timed else None


def find_longest_step(record: RunRecord) -> int | None:
    """Return the index of the longest step of the timed window. Indices count from the first step of the run, warm-up
    included."""
    timed = get_window(record)
    if timed is None or record.observations is None or record.observations.steps is None:
        return None
    return record.observations.steps.cut + timed.step_s.index(max(timed.step_s))


def compute_compute_s(record: RunRecord) -> float | None:
    """Return the median compute time per step in seconds, from a rehearsal, which runs one rank alone without
    communication. None for other runs."""
    observed = record.observations
    return statistics.median(observed.compute_s) if observed and observed.compute_s else None


def _build_quantile(percent: int, label: str) -> Metric:
    return Metric(f"step_s_p{percent}", label, "s", "less", lambda record: compute_step_quantile(record, percent / 100))


_COUNTED = "counted from the first step of the run"
METRICS = (
    Metric("n_steps", "number of timed steps (the window)", "steps", "neither", count_steps),
    build_metric(compute_step_s, "median step time of the window", "s"),
    *build_interval_ends("step_s", "the median step time", "s", "less", compute_step_interval),
    _build_quantile(95, "95th percentile of the step times of the window"),
    # with fewer than a hundred steps this is nearly the longest step
    _build_quantile(99, "99th percentile of the step times of the window"),
    build_metric(compute_step_s_max, "time of the longest step of the window", "s"),
    Metric("longest_step", f"index of the longest step of the window, {_COUNTED}", "", "neither", find_longest_step),
    build_metric(
        compute_compute_s, "median step time of a rehearsal: computation of one rank, without communication", "s"
    ),
)
