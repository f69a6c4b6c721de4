"""Flags, notes and outcomes of runs, each with its rule or meaning.

A flag marks a reason to doubt that a run measured its configuration, such as background load or an unfinished warm-up.
A note qualifies the interval of the step time, but not the step time itself.
"""

from collections.abc import Callable
from typing import NamedTuple

from analysis.observed import TimedWindow, find_job, find_slowest_link, find_slowest_rank, get_window
from analysis.stats.intervals import CHANGE, FEW, STALL_SHARE, WIDE, describe_window
from bench.core.quantities import BUSY_SHARE, PRESSURE_SHARE, is_busy
from bench.core.record import Observations, OutcomeKind, RankMemory, RunRecord
from bench.core.scheduling import find_foreign
from bench.core.spec import AdaptiveMeasure, MeasureSpec

_SHORT_STEPS, _SHORT_S = MeasureSpec().min_steps, MeasureSpec().window_s
_STALL_WINDOW_SHARE = 0.02  # fraction of the window; a smaller stall hardly changes the mean
_MEMORY_DRIFT = 0.01  # relative to the bytes of all reachable tensors
# Of 1,506 recorded ranks, no count differs by more than 64 KiB, which is 2.4 % in a small model with adapters.
_MEMORY_DRIFT_BYTES = 2**20


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
    """Return the names of the notes of a record, in the order of NOTES. A note qualifies the interval of the step time,
    in contrast to a flag, which casts doubt on the measurement itself."""
    return tuple(name for name, note in NOTES.items() if note.raised(record))


def _observed(rule: Callable[[Observations], bool]) -> Callable[[RunRecord], bool]:
    """Return a function for the rule of a flag. The function applies `rule` to the observations (measured values) of a
    record. For a record without observations, the function returns False."""
    return lambda record: record.observations is not None and rule(record.observations)


def _timed(rule: Callable[[TimedWindow], bool]) -> Callable[[RunRecord], bool]:
    """Return a function for the rule of a flag. The function applies `rule` to the timed window (steps after warm-up)
    of a record. For a record without a timed window, the function returns False."""
    return lambda record: (timed := get_window(record)) is not None and rule(timed)


def _is_short(record: RunRecord) -> bool:
    timed = get_window(record)
    if timed is None or len(timed.step_s) < _SHORT_STEPS or timed.seconds < _SHORT_S:
        return timed is not None
    # A window that ended by time is short for lack of steps. Adaptive windows, which only older records have, are an
    # exception: they ended by time if the interval of the step time stayed too wide.
    steps = record.observations.steps if record.observations else None
    return steps is not None and steps.stopped == "time" and not isinstance(record.spec.measure, AdaptiveMeasure)


def _has_drift(rank: RankMemory) -> bool:
    drift = abs(rank.drift or 0)
    return drift > _MEMORY_DRIFT and drift * (rank.resident_bytes or 0) > _MEMORY_DRIFT_BYTES


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
        "had a fault injected on purpose (a drill), so its values are never used",
        lambda record: "drill" in record.outcome.evidence or bool(record.observations and record.observations.drill),
    ),
    "foreign_hosts": Flag(
        "used hosts outside its job, because ranks of two jobs were mixed, so its values are never used",
        _has_foreign_hosts,
    ),
    "busy": Flag(
        "was made on a busy machine, so its times are excluded. The record has at least one sign of it: background "
        f"load and CPU steal above {100 * BUSY_SHARE:g} % of a node's cores; a CPU quota that stopped processes for "
        f"more than {100 * BUSY_SHARE:g} % of the window; waits for memory or for input and output in more than "
        f"{100 * PRESSURE_SHARE:g} % of the window; memory of another process on a device; a note `known_busy`",
        _is_busy,
    ),
    "paused": Flag(
        "was paused during its steps, so its times are excluded. Its job was suspended, its processes were stopped, or "
        "its machine was suspended",
        lambda record: record.outcome.paused_s > 0,
    ),
    "short": Flag(
        f"has a window (timed steps) of fewer than {_SHORT_STEPS} steps or less than {_SHORT_S:g} s, or a window that "
        "reached its time limit before its requested length",
        _is_short,
    ),
    "ended_early": Flag(
        "was ended by a search before its window was complete, because its steps were detectably slower than those of "
        "the best trial",
        _observed(lambda seen: seen.steps is not None and seen.steps.stopped == "slower"),
    ),
    "unsteady": Flag(
        "was timed before its step times were steady. The means of the first and last third of the window differ by "
        f"more than {100 * CHANGE:g} % and by more than their intervals allow",
        _is_unsteady,
    ),
    "skipped_steps": Flag(
        "skipped optimizer updates in its window after an overflow of the loss scale, which makes steps faster",
        _observed(lambda seen: seen.steps is not None and any(at >= seen.steps.cut for at in seen.steps.skipped)),
    ),
    "memory_drift": Flag(
        "has a memory count that differs by more than 1 % and 1 MiB from the bytes of all tensors that Python can "
        "reach",
        _observed(lambda seen: any(map(_has_drift, seen.memory))),
    ),
    "uninspected": Flag(
        "failed in the untimed steps after its window, so its collectives and its slow ranks are unknown",
        _observed(lambda seen: seen.uninspected is not None),
    ),
    "counted_flops": Flag(
        "has TFLOP/s and MFU from FLOPs that torch counted, because its model family has no formula for FLOPs",
        _observed(lambda seen: seen.counted_flops is not None),
    ),
    "straggler": Flag(
        "has a rank or a link that is much slower than the others; `slowest_rank`, `slowest_host` and "
        "`slowest_link_node` name it",
        lambda record: find_slowest_rank(record) is not None or find_slowest_link(record) is not None,
    ),
    "unverified": Flag(
        "has an unverified loss and gradient norm, because there is no run of the reference engine ddp for comparison, "
        "or its engine deviates from ddp by definition",
        lambda record: False,
    ),
    "dirty": Flag(
        "was made by code with uncommitted changes",
        lambda record: bool(record.environment and (record.environment.git or {}).get("dirty")),
    ),
}
"""Flags in the order of the column `flags`. `analysis.verify` sets `unverified`, which depends on other runs."""

NOTES = {
    "wide": Flag(
        f"has a 95 % interval of the mean step time that is wider than {100 * WIDE:g} %, or has no such interval",
        _timed(_is_wide),
    ),
    "few": Flag(
        f"has correlated step times with an effective sample size below {FEW}, so the 95 % interval of their mean may "
        "be too narrow",
        _timed(lambda timed: describe_window(timed.step_s).few),
    ),
    "stall": Flag(
        f"has a stall: the longest {100 * STALL_SHARE:g} % of its steps exceed the median step time by a total of more "
        f"than {100 * _STALL_WINDOW_SHARE:g} % of the window. `longest_step` is the index of the longest step, and "
        "`step_s_max` its time",
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
    "ok": "the run was measured to its end",
    "oom": "the device ran out of memory",
    "host_oom": "the host ran out of memory",
    "hang": "no step or phase ended within the allowed time; the record has the stack traces of every rank",
    "timeout": "the run exceeded the time limit of its attempt or of its job",
    "comm_error": "a collective operation failed, because the connection to another rank was lost",
    "node_failure": "the scheduler reported that a node failed",
    "preempted": "the scheduler took the nodes for another job",
    "cancelled": "the run was ended by Ctrl-C, `zeroscale cancel` or a command of the scheduler",
    "invalid": "a loss or gradient norm was not finite, or differed from that of the reference run",
    "error": "a rank raised an exception or died, and no other outcome applies",
    "pruned": "never run, because the same configuration ran out of memory in two runs with a smaller micro-batch",
    "infeasible": "never run, because its predicted memory is much larger than that of the device",
}
"""Meaning of each outcome of a run."""

_LONGER = "measure longer: set measure=full, or raise measure.window_s and measure.max_s"

REMEDIES = {
    "drill": "nothing; a drill only tests the harness",
    "foreign_hosts": "run the configuration again in a separate job",
    "busy": "run the configuration again on an idle machine; launcher.quiet_within_s=60 waits until it is idle",
    "paused": "run the configuration again",
    "short": _LONGER,
    "ended_early": "measure the configuration alone to get its full step time: zeroscale run with its overrides",
    "unsteady": "raise measure.warmup_steps or measure.window_s",
    "skipped_steps": "raise measure.warmup_steps, so that the loss scale settles during warm-up, or set precision=bf16",
    "memory_drift": "do not compare the memory of this run with that of other runs",
    "uninspected": "run the configuration again if you need these values; its step times remain valid",
    "counted_flops": "compare its TFLOP/s and MFU only with those of runs that have this flag",
    "straggler": "check the rank, host or link that these columns name, and run again without it",
    "unverified": "run engine=ddp with the same overrides",
    "dirty": "commit the changes and run again",
    "wide": "raise measure.window_s, or add repeats",
    "few": "raise measure.min_steps or measure.window_s",
    "stall": "look for other work on the machine at that step; if every run stalls, the run itself is the cause",
}
"""Remedy for each flag and note."""
