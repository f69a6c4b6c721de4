"""Flags: the doubts that a row of the run table carries, each with its rule in one table; and beside them notes.

A doubt says that a number may be of something else than was asked: a change that was not over, another's work. A note
says how wide or how well known the interval is that stands beside it, which is no doubt: the number is what it says.
"""

from collections.abc import Callable
from typing import NamedTuple

from analysis.observed import find_job, find_slowest_link, find_slowest_rank, get_window
from analysis.stats import windows
from analysis.stats.intervals import FEW, WIDE
from bench.core.quantities import BUSY_SHARE, PRESSURE_SHARE, is_busy
from bench.core.record import RunRecord
from bench.core.scheduling import find_foreign
from bench.core.spec import AdaptiveMeasure, MeasureSpec

_FULL = MeasureSpec()
_SHORT_STEPS, _SHORT_S = _FULL.min_steps, _FULL.window_s
_STALL_SHARE = 0.02  # of a window: by which its longest steps exceed the median
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
    if timed is None or len(timed.step_s) < _SHORT_STEPS or timed.seconds < _SHORT_S:
        return timed is not None
    steps = record.observations.steps if record.observations else None
    return steps is not None and steps.stopped == "time" and not isinstance(record.spec.measure, AdaptiveMeasure)


def _is_ended_early(record: RunRecord) -> bool:
    steps = record.observations.steps if record.observations else None
    return steps is not None and steps.stopped == "slower"


def _is_unsteady(record: RunRecord) -> bool:
    steps, timed = record.observations.steps if record.observations else None, get_window(record)
    if timed is None or steps is None:
        return False
    return steps.steady is False or windows.of(timed.step_s).changed


def _is_wide(record: RunRecord) -> bool:
    timed = get_window(record)
    if timed is None:
        return False
    interval = windows.of(timed.step_s).mean
    return interval is None or interval.high - interval.low > WIDE * timed.seconds / len(timed.step_s)


def _has_few_steps(record: RunRecord) -> bool:
    timed = get_window(record)
    return timed is not None and windows.of(timed.step_s).few


def _has_stall(record: RunRecord) -> bool:
    timed = get_window(record)
    return timed is not None and windows.of(timed.step_s).stall_s > _STALL_SHARE * timed.seconds


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
        f"shared its machine: background load or steal took more than {100 * BUSY_SHARE:g} % of a node's cores, or a "
        f"quota held the run back as much, or tasks waited for memory or for input and output in more than "
        f"{100 * PRESSURE_SHARE:g} % of the window, or other processes had memory on a device, or "
        "its record is marked `known_busy`; its times count for nothing",
        _busy,
    ),
    "paused": Flag(
        "was paused while it made steps: its job was suspended, its processes were stopped, or its machine slept; its "
        "times count for nothing",
        lambda record: record.outcome.paused_s > 0,
    ),
    "short": Flag(
        f"has a window of less than {_SHORT_STEPS} steps or less than {_SHORT_S:g} s, or one that ended before it had "
        "the steps that were asked for",
        _is_short,
    ),
    "ended_early": Flag(
        "was ended by a search within its window: a step surely took longer than that of the search's best trial",
        _is_ended_early,
    ),
    "unsteady": Flag(
        "was timed before its steps were steady: the mean of the window's last third is another than that of its "
        f"first third, by more than {100 * windows.CHANGE:g} % and by more than their intervals allow",
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
    "wide": Flag(
        f"has a 95 % interval of the mean step time, and so of its rates, wider than {100 * WIDE:g} %, or none at all",
        _is_wide,
    ),
    "few": Flag(
        f"has steps worth fewer than {FEW} independent ones: its mean's 95 % interval covers less", _has_few_steps
    ),
    "stall": Flag(
        f"has a stall: its longest {100 * windows.STALL_SHARE:g} % of steps exceed as many medians by more than "
        f"{100 * _STALL_SHARE:g} % of the window; `longest_step` is the longest, `step_s_max` its time",
        _has_stall,
    ),
}
"""In the order of their own column."""

NO_MEASUREMENT = ("drill", "foreign_hosts")
"""Flags of runs whose numbers answer nothing, however they ended."""

DISTURBED = ("busy", "paused")
"""Flags of runs whose times count for nothing, because a cause outside of the run changed them: they decide nothing and
are pooled with nothing. Their memory and their losses stand. A run is never excluded for its own steps, such as
`unsteady` ones: a configuration that throttles in some allocations would then look as fast as it is in the others."""

_LONGER = "measure longer: measure=full, or a larger measure.window_s and measure.max_s"

REMEDIES = {
    "drill": "nothing: a drill tests the harness",
    "foreign_hosts": "run it again, in a job of its own",
    "busy": "run it again on an idle machine; launcher.quiet_within_s=60 waits for one",
    "paused": "run it again",
    "short": _LONGER,
    "ended_early": "for its own time, measure it alone: zeroscale run with its overrides",
    "unsteady": "raise measure.warmup_steps or measure.window_s",
    "skipped_steps": "raise measure.warmup_steps, so that the loss scale settles before, or set precision=bf16",
    "memory_drift": "do not compare its memory with that of other runs",
    "uninspected": "run it again; its step times stand",
    "counted_flops": "compare its TFLOP/s and MFU only with those of runs that have this flag",
    "straggler": "look at the rank, host or link that these columns name, and run again without it",
    "unverified": "run engine=ddp with the same overrides",
    "dirty": "commit the changes and run again",
    "wide": "raise measure.window_s, or run more repeats",
    "few": "raise measure.min_steps or measure.window_s",
    "stall": "look for other work on the machine at that step; if it repeats, the step is the run's own",
}
"""What to do about each flag and note."""
