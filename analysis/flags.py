"""Flags, notes and outcomes of runs, each with its rule or meaning.

A flag marks a reason to doubt that a run measured its configuration, such as background load or an unfinished warm-up.
A note qualifies the interval of the step time, but not the step time itself.
"""

from collections.abc import Callable
from typing import NamedTuple

from analysis.observed import TimedWindow, find_job, find_slowest_link, find_slowest_rank, get_window
from analysis.stats.intervals import CHANGE, FEW, STALL_SHARE, WIDE, describe_window
from bench.core.quantities import BUSY_SHARE, PRESSURE_SHARE, is_busy
from bench.core.record import Observations, OutcomeKind, RunRecord
from bench.core.scheduling import find_foreign
from bench.core.spec import AdaptiveMeasure, MeasureSpec

_SHORT_STEPS, _SHORT_S = MeasureSpec().min_steps, MeasureSpec().window_s
_STALL_WINDOW_SHARE = 0.02  # fraction of the window; a smaller stall hardly changes the mean
_MEMORY_DRIFT = 0.01  # relative to the bytes of all reachable tensors


class Flag(NamedTuple):
    """The rule of a flag or note. `raised` returns True if the rule applies to a record. `meaning` completes the
    sentence "this run …"."""

    meaning: str
    raised: Callable[[RunRecord], bool]


def list_flags(record: RunRecord) -> tuple[str, ...]:
    """Return the names of the flags that follow from a record alone, in the order of FLAGS. The flag `unverified`
    depends on other records and is not included."""
    return tuple(name for name, flag in FLAGS.items() if flag.raised(record))


def list_notes(record: RunRecord) -> tuple[str, ...]:
    """Return the names of the notes of a record, in the order of NOTES."""
    return tuple(name for name, note in NOTES.items() if note.raised(record))


def _observed(rule: Callable[[Observations], bool]) -> Callable[[RunRecord], bool]:
    """Return a flag's rule that applies `rule` to the observations of a record. It is False for a record without
    observations."""
    return lambda record: record.observations is not None and rule(record.observations)


def _timed(rule: Callable[[TimedWindow], bool]) -> Callable[[RunRecord], bool]:
    """Return a flag's rule that applies `rule` to the timed window of a record. It is False for a record without a
    timed window."""
    return lambda record: (timed := get_window(record)) is not None and rule(timed)


def _is_short(record: RunRecord) -> bool:
    timed = get_window(record)
    if timed is None or len(timed.step_s) < _SHORT_STEPS or timed.seconds < _SHORT_S:
        return timed is not None
    # older records have adaptive windows, which ended by time if the interval stayed too wide, not for a lack of steps
    steps = record.observations.steps if record.observations else None
    return steps is not None and steps.stopped == "time" and not isinstance(record.spec.measure, AdaptiveMeasure)


def _is_unsteady(record: RunRecord) -> bool:
    steps, timed = record.observations.steps if record.observations else None, get_window(record)
    if timed is None or steps is None:
        return False
    return steps.steady is False or describe_window(timed.step_s).changed


def _is_wide(timed: TimedWindow) -> bool:
    interval = describe_window(timed.step_s).mean
    return interval is None or interval.high - interval.low > WIDE * timed.seconds / len(timed.step_s)


def _is_busy(record: RunRecord) -> bool:
    timed = get_window(record)
    return timed is not None and record.observations is not None and is_busy(record.observations, timed.seconds)


def _has_foreign_hosts(record: RunRecord) -> bool:
    environment, job = record.environment, find_job(record.environment)
    return bool(environment and job and find_foreign(environment.hosts, job.nodelist))


FLAGS = {
    "drill": Flag(
        "had a fault injected on purpose, so it is never a measurement", _observed(lambda seen: seen.drill is not None)
    ),
    "foreign_hosts": Flag(
        "ran on a host outside its job: ranks of two jobs were mixed, so it is never a measurement", _has_foreign_hosts
    ),
    "busy": Flag(
        f"shared its machine: background load or steal took more than {100 * BUSY_SHARE:g} % of a node's cores, or a "
        f"quota held the run back as much, or tasks waited for memory or for input and output in more than "
        f"{100 * PRESSURE_SHARE:g} % of the window, or other processes had memory on a device, or "
        "its record is marked `known_busy`; its times are excluded",
        _is_busy,
    ),
    "paused": Flag(
        "was paused while it made steps: its job was suspended, its processes were stopped, or its machine slept; its "
        "times are excluded",
        lambda record: record.outcome.paused_s > 0,
    ),
    "short": Flag(
        f"has a window of less than {_SHORT_STEPS} steps or less than {_SHORT_S:g} s, or one that ended before it had "
        "the requested steps",
        _is_short,
    ),
    "ended_early": Flag(
        "was ended by a search within its window: a step surely took longer than that of the search's best trial",
        _observed(lambda seen: seen.steps is not None and seen.steps.stopped == "slower"),
    ),
    "unsteady": Flag(
        "was timed before its steps were steady: the means of the window's first and last third differ by more than "
        f"{100 * CHANGE:g} % and by more than their intervals allow",
        _is_unsteady,
    ),
    "skipped_steps": Flag(
        "skipped optimizer updates in its window, which makes steps cheaper",
        _observed(lambda seen: seen.steps is not None and any(at >= seen.steps.cut for at in seen.steps.skipped)),
    ),
    "memory_drift": Flag(
        "counted memory that differs by more than 1 % from the bytes of all reachable tensors",
        _observed(lambda seen: any(abs(rank.drift or 0) > _MEMORY_DRIFT for rank in seen.memory)),
    ),
    "uninspected": Flag(
        "was lost in the untimed steps after its window: its collectives and stragglers are unknown",
        _observed(lambda seen: seen.uninspected is not None),
    ),
    "counted_flops": Flag(
        "has its FLOPs counted by torch, because its model family has no formula: TFLOP/s and MFU rest on that count",
        _observed(lambda seen: seen.counted_flops is not None),
    ),
    "straggler": Flag(
        "waited for one of its ranks or links: slowest_rank, slowest_host and slowest_link_node name it",
        lambda record: find_slowest_rank(record) is not None or find_slowest_link(record) is not None,
    ),
    "unverified": Flag(
        "has no run of the reference engine to compare its gradient norm and loss with", lambda record: False
    ),
    "dirty": Flag(
        "was made by code with uncommitted changes",
        lambda record: bool(record.environment and (record.environment.git or {}).get("dirty")),
    ),
}
"""Flags in the order of the column `flags`. `analysis.verify` sets `unverified`, which depends on other runs."""

NOTES = {
    "wide": Flag(
        f"has a 95 % interval of the mean step time, and so of its rates, wider than {100 * WIDE:g} %, or none at all",
        _timed(_is_wide),
    ),
    "few": Flag(
        f"has steps worth fewer than {FEW} independent steps: the 95 % interval of its mean may be too narrow",
        _timed(lambda timed: describe_window(timed.step_s).few),
    ),
    "stall": Flag(
        f"has a stall: its longest {100 * STALL_SHARE:g} % of steps took longer than as many median steps, by more "
        f"than {100 * _STALL_WINDOW_SHARE:g} % of the window; `longest_step` is the longest, `step_s_max` its time",
        _timed(lambda timed: describe_window(timed.step_s).stall_s > _STALL_WINDOW_SHARE * timed.seconds),
    ),
}
"""Notes in the order of the column `notes`."""

NO_MEASUREMENT = ("drill", "foreign_hosts")
"""Flags of runs whose values are never used, regardless of their outcome."""

DISTURBED = ("busy", "paused")
"""Flags of runs whose times are excluded because of an external cause. Their memory and losses remain valid.

A run is never excluded because of its own step times, for example because it is `unsteady`. Otherwise a configuration
that throttles in some allocations would look as fast as in the allocations without throttling.
"""
UNTRUSTED = (*DISTURBED, *NO_MEASUREMENT)
"""Flags of runs whose times do not measure their configuration."""

OUTCOMES: dict[OutcomeKind, str] = {
    "ok": "measured",
    "oom": "the device's memory did not suffice",
    "host_oom": "the host's memory did not suffice",
    "hang": "no step or phase ended for too long; the record has the stack traces of every rank",
    "timeout": "the time limit of the attempt, or of its job, ended it",
    "comm_error": "a collective failed: a peer was lost",
    "node_failure": "the scheduler reported that a node failed",
    "preempted": "the scheduler took the nodes for another job",
    "cancelled": "ended by Ctrl-C, `zeroscale cancel` or the scheduler's own command",
    "invalid": "a loss or gradient that is not a number, or that differs from that of the reference run",
    "error": "a rank raised an exception or died, for none of the reasons above",
    "pruned": "never run: with a smaller micro-batch, the same configuration ran out of memory in two runs",
    "infeasible": "never run: its predicted memory exceeds that of the device by far",
}
"""Meaning of each outcome of a run."""

_LONGER = "measure longer: measure=full, or a larger measure.window_s and measure.max_s"

REMEDIES = {
    "drill": "none needed: a drill tests the harness",
    "foreign_hosts": "run it again, in a job of its own",
    "busy": "run it again on an idle machine; launcher.quiet_within_s=60 waits for one",
    "paused": "run it again",
    "short": _LONGER,
    "ended_early": "to know its full time, measure it alone: zeroscale run with its overrides",
    "unsteady": "raise measure.warmup_steps or measure.window_s",
    "skipped_steps": "raise measure.warmup_steps, so that the loss scale settles before, or set precision=bf16",
    "memory_drift": "do not compare its memory with that of other runs",
    "uninspected": "run it again if you need them; its step times remain valid",
    "counted_flops": "compare its TFLOP/s and MFU only with those of runs that have this flag",
    "straggler": "look at the rank, host or link that these columns name, and run again without it",
    "unverified": "run engine=ddp with the same overrides",
    "dirty": "commit the changes and run again",
    "wide": "raise measure.window_s, or run more repeats",
    "few": "raise measure.min_steps or measure.window_s",
    "stall": "look for other work on the machine at that step; if the stall repeats, the run itself causes it",
}
"""Remedy for each flag and note."""
