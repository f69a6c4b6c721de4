"""Flags: the doubts that a row of the run table carries, each with its rule in one table; and beside them notes.

A doubt says that a number may be of something else than was asked: a change that was not over, another's work. A note
says how wide or how well known the interval is that stands beside it, which is no doubt: the number is what it says.
"""

import statistics
from collections.abc import Callable
from typing import NamedTuple

from analysis.observed import compute_step_interval, find_job, find_slowest_link, find_slowest_rank, get_window
from analysis.stats import windows
from analysis.stats.series import FEW
from bench.nodelist import find_foreign
from bench.others import BUSY_SHARE, is_busy
from bench.record import RunRecord
from bench.statistics import SURE, SUSPECTED

_SHORT_STEPS, _SHORT_S = 30, 20.0  # MeasureSpec's own defaults for a window that is long enough
_DRIFT = 0.01


class Flag(NamedTuple):
    """`meaning` completes the sentence "this run …"."""

    meaning: str
    raised: Callable[[RunRecord], bool]


def list_flags(record: RunRecord) -> tuple[str, ...]:
    """Return the flags that a record raises by itself, in the table's order."""
    return tuple(name for name, flag in FLAGS.items() if flag.raised(record))


def list_notes(record: RunRecord) -> tuple[str, ...]:
    """Return the notes of a record, in the table's order."""
    return tuple(name for name, note in NOTES.items() if note.raised(record))


def _has_injected_fault(record: RunRecord) -> bool:
    return record.observations is not None and record.observations.drill is not None


def _is_short(record: RunRecord) -> bool:
    timed = get_window(record)
    return timed is not None and (len(timed.step_s) < _SHORT_STEPS or timed.seconds < _SHORT_S)


def _is_ended_early(record: RunRecord) -> bool:
    steps = record.observations.steps if record.observations else None
    return steps is not None and steps.stopped == "slower"


def _is_unsteady(record: RunRecord) -> bool:
    steps, timed = record.observations.steps if record.observations else None, get_window(record)
    if timed is None or steps is None:
        return False
    # A window that ended because it was narrow had no hint of a change; of one that a budget ended, less is proof.
    level = SUSPECTED if _is_wide(record) or _has_few_steps(record) else SURE
    return not steps.steady or windows.is_changing(timed.step_s, record.spec.measure.width, level)


def _is_wide(record: RunRecord) -> bool:
    timed = get_window(record)
    if timed is None:
        return False
    interval, requested_width = (
        compute_step_interval(record),
        record.spec.measure.width,
    )  # the one that ends a window, and is shown
    return interval is None or interval.high - interval.low > requested_width * statistics.median(timed.step_s)


def _has_few_steps(record: RunRecord) -> bool:
    timed = get_window(record)
    return timed is not None and windows.of(timed.step_s).few


def _has_skipped_steps(record: RunRecord) -> bool:
    steps = record.observations.steps if record.observations else None
    return steps is not None and any(step >= steps.cut for step in steps.skipped)


def _has_memory_drift(record: RunRecord) -> bool:
    ranks = record.observations.memory if record.observations else ()
    return any(rank.drift is not None and abs(rank.drift) > _DRIFT for rank in ranks)


def _is_uninspected(record: RunRecord) -> bool:
    return record.observations is not None and record.observations.uninspected is not None


def _has_counted_flops(record: RunRecord) -> bool:
    return record.observations is not None and record.observations.counted_flops is not None


def _has_straggler(record: RunRecord) -> bool:
    return find_slowest_rank(record) is not None or find_slowest_link(record) is not None


def _busy(record: RunRecord) -> bool:
    timed = get_window(record)
    return timed is not None and record.observations is not None and is_busy(record.observations, timed.seconds)


def _has_foreign_hosts(record: RunRecord) -> bool:
    environment, around = record.environment, find_job(record.environment)
    return bool(environment and around and find_foreign(environment.hosts, around.nodelist))


def _is_dirty(record: RunRecord) -> bool:
    git = record.environment.git if record.environment else None
    return bool(git and git.get("dirty"))


FLAGS = {
    "drill": Flag("had a fault planted on purpose; it is never a measurement", _has_injected_fault),
    "foreign_hosts": Flag(
        "ran on a host that was not its job's: nodes of two jobs met, and it is never a measurement",
        _has_foreign_hosts,
    ),
    "busy": Flag(
        f"shared its machine: others took more than {100 * BUSY_SHARE:g} % of a node's cores, or a quota held it back "
        "as much, or they had memory on a device",
        _busy,
    ),
    "paused": Flag(
        "was paused while it made steps: its job was suspended, its processes were stopped, or its machine slept",
        lambda record: record.outcome.paused_s > 0,
    ),
    "short": Flag(f"has a window of less than {_SHORT_STEPS} steps or less than {_SHORT_S:g} s", _is_short),
    "ended_early": Flag(
        "was ended by a search within its window: a step surely took longer than that of the search's best trial",
        _is_ended_early,
    ),
    "unsteady": Flag(
        "was timed before its steps were steady: the warm-up's budget ended first, or they changed within the window",
        _is_unsteady,
    ),
    "skipped_steps": Flag("skipped updates in its window, which makes steps cheaper", _has_skipped_steps),
    "memory_drift": Flag("counted memory that is more than 1 % off the tensors that can be reached", _has_memory_drift),
    "uninspected": Flag(
        "was lost in the untimed steps after its window: its collectives and stragglers are unknown", _is_uninspected
    ),
    "counted_flops": Flag(
        "has its FLOPs counted by torch, for no formula of its family tells them: TFLOP/s and MFU rest on that",
        _has_counted_flops,
    ),
    "straggler": Flag(
        "waited for one of its ranks or links: slowest_rank, slowest_host and slowest_link_node name it", _has_straggler
    ),
    "unverified": Flag(
        "has no run of the reference engine beside it to compare its gradient norm and loss with", lambda record: False
    ),
    "dirty": Flag("was made by code with uncommitted changes", _is_dirty),
}
"""In the order of the column. `unverified` depends on the other runs: `analysis.verify` decides it."""

NOTES = {
    "wide": Flag("has a 95 % interval of the median step time wider than was asked, or none at all", _is_wide),
    "few": Flag(
        f"has steps worth fewer than {FEW} independent ones: its median's 95 % interval covers less", _has_few_steps
    ),
}
"""In the order of their own column."""

NO_MEASUREMENT = ("drill", "foreign_hosts")
"""Flags of runs whose numbers answer nothing, however they ended."""

UNSOUND = ("unsteady", "skipped_steps")
"""Flags of runs that decide nothing: their time is another than that of the configuration. What makes a run less sure,
as a short window does, is in the scatter of the repeats; a straggler may be the configuration's own."""
