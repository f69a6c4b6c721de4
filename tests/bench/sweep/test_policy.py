"""Tests of the next decision of a sweep. The decision follows from the sweep's plan, the files in its folder, the state
of its jobs in the scheduler, and the time.

Tests describe points, attempts and decisions as text. The points m1, m2, m4 and m8 differ only in the micro-batch,
which is 1, 2, 4 or 8. An attempt is a point and its outcome, such as `m4 oom`. A suffix of the point names another
repeat (`m4#1 oom`), machine (`m4@fast oom`) or environment (`m4~old ok`).

An expected decision is a verb and a point. `run m4` starts a run. `pruned m8` writes a record without a run. `left m4`
skips the point, and `waits m4` postpones the point. If m4 has just run out of memory, `confirm m4` runs the point
again.
"""

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from bench.core.machine import Machine
from bench.core.record import OutcomeKind
from bench.core.store import RunAttempt
from bench.predict.neighbours import Correction
from bench.sweep.definition import RunKey, SweepPoint
from bench.sweep.forecast import Forecast, MemoryForecast
from bench.sweep.policy import (
    Decision,
    PlannedRun,
    PostponeRun,
    RecordWithoutRun,
    SkipRun,
    Snapshot,
    StartRun,
    SweepPlan,
    explain_given_up,
    find_answer,
    list_decisions,
    next_run,
)
from bench.sweep.pruning import find_siblings

_ATTEMPT = re.compile(r"(\w+)(?:#(\d))?(?:@(\w+))?(?:~(\w+))? (\w+)")
GIB = 2**30


def key(run: str) -> RunKey:
    name, _, repeat = run.partition("#")
    return RunKey(name, "here", int(repeat or 0))


def attempts(text: str) -> dict[str, list[RunAttempt]]:
    """Return the attempts that a text such as `m4 oom, m4#1 ok` describes. `m4#1` is repeat 1 of configuration m4;
    without `#`, it is repeat 0. The keys of the returned dict are configurations, such as `m4`."""
    found: dict[str, list[RunAttempt]] = {}
    for name, repeat, machine, environment, kind in _ATTEMPT.findall(text):
        before = found.setdefault(name, [])
        number = len(before)
        where: dict[str, Any] = {"machine": machine or "here", "environment_id": environment or None}
        before.append(RunAttempt(Path(name) / f"{repeat or 0}.{number}", int(repeat or 0), number, kind, kind, **where))
    return found


def runs(text: str, **more: Any) -> list[PlannedRun]:
    """Return the planned runs that a text such as `m4 m8 m4#1` describes. `m4#1` is repeat 1 of configuration m4;
    without `#`, it is repeat 0. `more` has further fields that each planned run gets."""
    keys = [key(run) for run in text.split()]
    spec = {name: {"batch": {"micro": int(name[1:]), "accumulation": 1}} for name, *_ in keys}
    kin = find_siblings((one, spec[one.config_id]) for one in keys)
    return [PlannedRun(one, kin[one[:2]], **more) for one in keys]


def predicted(run: PlannedRun, needs_gib: float, has_gib: float = 10) -> PlannedRun:
    """Return a copy of a run that is predicted to need `needs_gib` GiB on a device with `has_gib` GiB."""
    room = MemoryForecast(
        low_bytes=int(needs_gib * GIB), high_bytes=int(needs_gib * GIB), tensor_bytes=int(needs_gib * GIB)
    )
    plain: dict[str, Any] = {"config_id": run.key.config_id, "line": "", "machine": "here", "nodes": 1}
    more: dict[str, Any] = {"devices_per_node": 1, "time_limit_min": None, "overrides": (), "spec": {}}
    point = SweepPoint(**plain, **more, forecast=Forecast(room=room))
    return run._replace(point=point, machine=Machine(name="here", device="cpu", memory_bytes=int(has_gib * GIB)))


def describe(decision: Decision) -> str:
    run = decision.run
    name = run.key.config_id + (f"#{run.key.repeat}" if run.key.repeat else "")
    match decision:
        case StartRun():
            return f"{'confirm' if run.role == 'confirm' else 'run'} {name}"
        case RecordWithoutRun(outcome=outcome):
            return f"{outcome.kind} {name}"
        case PostponeRun():
            return f"waits {name}"
        case SkipRun():
            return f"left {name}"


def walk(plan: SweepPlan, snapshot: Snapshot, tried: dict[str, list[RunAttempt]], ends: str) -> list[str]:
    """Execute all decisions of a pass through a plan without running anything, and return them as texts.

    An attempt is one try at a run. `tried` has the attempts so far; the attempts of this pass are added to it. `ends`
    is a text with their outcomes, such as `m1 error, m2 ok, m1 oom`: here the first attempt at m1 ends `error`, and the
    second `oom`. An attempt without an outcome in this text ends `ok`.
    """
    left, passed = attempts(ends), []
    while decision := next_run(plan, snapshot._replace(passed=passed)):
        passed.append(decision)
        name, _, repeat = decision.run.key
        before = tried.setdefault(name, [])
        if isinstance(decision, StartRun):
            ended = left[name].pop(0).outcome if left.get(name) else "ok"
        elif isinstance(decision, RecordWithoutRun):
            ended = decision.outcome.kind
        else:
            continue
        before.append(RunAttempt(Path(name) / f"{repeat}.{len(before)}", repeat, len(before), ended, "", "here"))
    return [describe(decision) for decision in passed]


class Row(NamedTuple):
    """A test case: a plan, the attempts so far (`tried`), and the expected decisions. `passes` has the decisions if
    points are run one after another. `at_once` has the decisions if all points are submitted together."""

    plan: str
    tried: str
    passes: str | None = None
    at_once: str | None = None
    ends: str = ""  # outcomes of the runs that the pass starts
    run: dict[str, Any] = {}  # fields of every planned run
    sweep: dict[str, Any] = {}  # fields of the plan
    seen: dict[str, Any] = {}  # fields of the snapshot


def _busy(name: str) -> Callable[[RunKey], str]:
    return lambda one: "is under way in job 7" if one.config_id == name else ""


CONTROL = {"control": PlannedRun(key("c"), limit_min=10)}
AGAIN = {"confirm_answered": True}
TABLE = {
    # order of points, and the control point
    "points run in the order asked": Row("m4 m1 m2", "", "run m4, run m1, run m2", "run m4, run m1, run m2"),
    "the control point comes first and last": Row("m1 m2", "", "run c, run m1, run m2, run c", sweep=CONTROL),
    "a submission leaves the control point to its jobs": Row("m1 m2", "", at_once="run m1, run m2", sweep=CONTROL),
    "the control point runs around points that need not run": Row(
        "m4", "m4 ok", "run c, left m4, run c", sweep=CONTROL
    ),
    "without points the control point does not run": Row("", "", "", "", sweep=CONTROL),
    "a failed control point does not end the pass": Row(
        "m1", "", "run c, run m1, run c", ends="c error, m1 error, c oom", sweep=CONTROL
    ),
    # attempts that are an answer
    "points with a final answer are skipped": Row("m1 m2", "m1 ok, m2 oom", "left m1, left m2", "left m1, left m2"),
    "a run with invalid numbers is an answer": Row("m1", "m1 invalid", "left m1", "left m1"),
    "a temporary failure is no answer": Row("m1", "m1 error, m1 hang, m1 cancelled", "run m1", "run m1"),
    "answer of another repeat": Row("m1 m1#1", "m1#1 ok", "run m1, left m1#1", "run m1, left m1#1"),
    "answer of another machine": Row("m1", "m1@fast ok", "run m1", "run m1"),
    "answer of another environment": Row("m1", "m1~old ok", "run m1", "run m1", run={"environment_id": "new"}),
    "answer of any environment if the plan has none": Row("m1", "m1~old ok", "left m1", "left m1"),
    "a record without a run holds in every environment": Row(
        "m1", "m1 pruned", "left m1", run={"environment_id": "new"}
    ),
    "a record without a run does not hold if pruning is off": Row(
        "m1", "m1 pruned", "run m1", "run m1", run={"prune": False}
    ),
    "a record without a run does not hold for a reopened point": Row(
        "m1", "m1 infeasible", "run m1", run={"reopened": True}
    ),
    # number of attempts
    "attempts are used up": Row("m1", "m1 error, m1 hang", "left m1", "left m1", run={"attempts": 2}),
    "attempts are not used up by preemption": Row(
        "m1", "m1 error, m1 preempted", "run m1", "run m1", run={"attempts": 2}
    ),
    "attempts are not used up on another machine": Row("m1", "m1 error, m1@fast error", "run m1", run={"attempts": 2}),
    "a pass tries each point once": Row("m1 m2", "", "run m1, run m2", ends="m1 error", run={"attempts": 2}),
    "jobs that led to no answer use up attempts": Row(
        "m1", "", at_once="left m1", run={"attempts": 2}, seen={"submitted": {key("m1"): 10}}
    ),
    # points that another job runs
    "a point in another job is skipped": Row(
        "m1 m2", "", "left m1, run m2", "left m1, run m2", seen={"busy": _busy("m1")}
    ),
    # points that run out of memory
    "an out-of-memory is confirmed, then larger ones are pruned": Row(
        "m2 m4 m8", "", "run m2, confirm m2, pruned m4, pruned m8", ends="m2 oom, m2 oom"
    ),
    "an out-of-memory is contradicted": Row("m2 m4", "", "run m2, confirm m2, run m4", ends="m2 oom, m2 ok"),
    "a smaller micro-batch may still fit": Row("m4 m1", "m4 oom, m4 oom", "left m4, run m1", "left m4, run m1"),
    "an out-of-memory is confirmed once": Row("m2 m4", "", "run m2, confirm m2, run m4", ends="m2 oom, m2 error"),
    "no confirmation without larger points": Row("m4 m2", "", "run m4, run m2", ends="m4 oom"),
    "no confirmation if larger points have answers": Row("m2 m4", "m4 ok", "run m2, left m4", ends="m2 oom"),
    "repeats confirm each other": Row(
        "m2 m4 m2#1 m4#1", "", "run m2, run m4, run m2#1, pruned m4#1", ends="m2 oom, m2 oom"
    ),
    "no confirmation if pruning is off": Row(
        "m2 m4", "", "run m2, run m4", "run m2, run m4", ends="m2 oom", run={"prune": False}
    ),
    "an earlier out-of-memory is confirmed by submission": Row(
        "m2 m4", "m2 oom", at_once="run m2, run m4", sweep=AGAIN, run={"attempts": 1}
    ),
    "an earlier out-of-memory is not confirmed by a pass": Row("m2 m4", "m2 oom", "left m2, run m4"),
    "a confirmed out-of-memory is not confirmed again by submission": Row(
        "m2 m4", "m2 oom, m2 oom", at_once="left m2, pruned m4", sweep=AGAIN
    ),
    "an out-of-memory is not confirmed while a job has its point": Row(
        "m2 m4", "m2 oom", at_once="left m2, run m4", sweep=AGAIN, seen={"busy": _busy("m2")}
    ),
    # time left and node-hours
    "the last control point keeps its time": Row(
        "m1", "", "run c, waits m1, run c", sweep=CONTROL, run={"limit_min": 10}, seen={"left_s": 900.0}
    ),
    "both points fit the time left": Row("m1 m2", "", "run m1, run m2", run={"limit_min": 10}, seen={"left_s": 600.0}),
    "no point fits the time left": Row("m1", "", "waits c, waits m1, waits c", sweep=CONTROL, seen={"left_s": 599.0}),
    "a point longer than the time left waits": Row("m1", "", "waits m1", run={"limit_min": 11}, seen={"left_s": 600.0}),
    "the budget is spent": Row(
        "m1 m2", "m1 ok", at_once="left m1, waits m2", sweep={"node_hours": 2.0}, seen={"spent_node_hours": 2.0}
    ),
    "the budget is not spent": Row(
        "m1", "", at_once="run m1", sweep={"node_hours": 2.0}, seen={"spent_node_hours": 1.9}
    ),
    "points that need not run cost no node-hours": Row(
        "m2 m4",
        "m2 oom, m2 oom",
        at_once="left m2, pruned m4",
        sweep={"node_hours": 2.0},
        seen={"spent_node_hours": 3.0},
    ),
}


@pytest.mark.parametrize("name", TABLE)
def test_decisions_of_a_pass_and_of_a_submission(name: str) -> None:
    row = TABLE[name]
    tried = attempts(row.tried)
    plan = SweepPlan(runs(row.plan, **row.run), **row.sweep)
    snapshot = Snapshot(lambda config_id: tried.get(config_id, []), **row.seen)
    if row.at_once is not None:
        assert ", ".join(map(describe, list_decisions(plan, snapshot))) == row.at_once
    if row.passes is not None:
        assert ", ".join(walk(plan, snapshot, tried, row.ends)) == row.passes


def test_confirmation_run_and_later_points_are_postponed_without_time_left() -> None:
    plan, tried = SweepPlan(runs("m2 m4", limit_min=10)), attempts("")
    first = next_run(plan, Snapshot(lambda name: tried.get(name, []), left_s=900))
    assert isinstance(first, StartRun)
    tried |= attempts("m2 oom")
    passed: list[Decision] = [first]
    for left_s in itertools.repeat(300, 2):
        decision = next_run(plan, Snapshot(lambda name: tried.get(name, []), left_s=left_s, passed=passed))
        assert decision
        passed.append(decision)
    assert [(describe(decision), decision.run.role) for decision in passed] == [
        ("run m2", "point"), ("waits m2", "confirm"), ("waits m4", "point"),
    ]  # fmt: skip
    assert next_run(plan, Snapshot(lambda name: tried.get(name, []), passed=passed)) is None


@pytest.mark.parametrize(
    ("needs_gib", "memory", "tried", "expected"),
    [
        (9, 1.0, "", "run m1"),
        (11, 1.0, "", "run m1"),  # above the device's 10 GiB, but by less than 20 %
        (13, 0.9, "m1 infeasible", "run m1"),  # measured neighbours revoke the prediction
        (13, 0.9, "m1 infeasible, m1 pruned", "left m1"),
        (13, 0.9, "m1 infeasible, m1 error, m1 error", "left m1"),  # the allowed number of attempts is used up
        (13, 1.0, "m1 infeasible", "left m1"),
        (13, 0.9, "m1 infeasible, m1 oom", "left m1"),
    ],
)
def test_prediction_answers_a_point_unless_measured_neighbours_revoke_it(
    needs_gib: float, memory: float, tried: str, expected: str
) -> None:
    [run] = runs("m1", attempts=2)
    found = attempts(tried)
    snapshot = Snapshot(lambda name: found.get(name, []), lambda point: Correction(memory=memory, runs=2))
    assert [describe(found) for found in list_decisions(SweepPlan([predicted(run, needs_gib)]), snapshot)] == [expected]


def test_predicted_records_are_kept_if_a_plan_has_no_predictions() -> None:
    """The point has a predicted record with the outcome `infeasible`. The plan of a job has no predictions, because
    predictions were checked when the job was submitted. Even so, the plan must skip the point."""
    found = attempts("m1 infeasible")
    snapshot = Snapshot(lambda name: found.get(name, []), lambda point: Correction(memory=0.1, runs=2))
    assert [describe(found) for found in list_decisions(SweepPlan(runs("m1")), snapshot)] == ["left m1"]


def test_given_up_point_has_a_reason() -> None:
    tried = attempts("m1 error, m1 hang")["m1"]
    assert explain_given_up(tried, 2) == "after 2 attempts; the last: hang"
    assert (
        explain_given_up([], 2, submitted=10) == "10 jobs were submitted for this point, and none left a final result"
    )
    assert explain_given_up(tried, 3) == "" and explain_given_up([], 2) == ""
    assert explain_given_up(attempts(", ".join(["m1 preempted"] * 10))["m1"], 2), (
        "preemptions end a point, too, after 10 attempts"
    )


# -- attempts that failed for external causes


def failed(number: int, kind: OutcomeKind = "error", **more: Any) -> RunAttempt:
    return RunAttempt(Path(f"m4/0.{number}"), 0, number, kind, kind, "here", **more)


def test_run_with_an_injected_fault_is_no_answer_and_no_attempt() -> None:
    drilled = [failed(number, "ok", drill=True) for number in range(4)]
    assert find_answer(drilled, prune=True) is None and explain_given_up(drilled, 3) == ""
    real = failed(4, "ok")
    assert find_answer([*drilled, real], prune=True) is real


def test_paused_run_is_no_answer_and_costs_no_attempt() -> None:
    paused = [failed(number, "ok", paused_s=15.0) for number in range(14)]
    assert find_answer(paused, prune=True) is None and explain_given_up(paused, 3) == ""
    given_up = explain_given_up([*paused, failed(14, "ok", paused_s=8.0)], 3)
    assert given_up == "after 15 attempts; the last: paused for 8 s"
    assert explain_given_up([failed(number, "hang", paused_s=15.0) for number in range(4)], 3) == ""
    full = failed(4, "oom", paused_s=15.0)
    assert find_answer([*paused, full], prune=True) is full, "memory does not depend on time"


def test_full_disk_or_busy_machine_costs_no_attempt_but_ends_after_15_tries() -> None:
    full = [failed(number, excused=True) for number in range(14)]
    assert explain_given_up([*full[:4], failed(4), failed(5)], 3) == ""
    assert explain_given_up([*full, failed(14)], 3)


def test_node_failure_costs_no_attempt_but_ends_after_15_tries() -> None:
    lost = [failed(number, "node_failure") for number in range(14)]
    assert explain_given_up([*lost[:4], failed(4), failed(5)], 3) == ""
    assert explain_given_up([*lost[:4], failed(4), failed(5), failed(6)], 3)
    assert explain_given_up([*lost, failed(14, "node_failure")], 3), "the point may be the cause"


def test_jobs_that_failed_before_any_attempt_count_like_attempts() -> None:
    assert explain_given_up([], 3, 2, ["job 1 FAILED", "job 2 FAILED"]) == ""
    assert explain_given_up([], 3, 3, ["job 1 FAILED"] * 3) == (
        "0 attempts failed, and 3 jobs failed before an attempt; the last: job 1 FAILED"
    )
    assert "1 job failed before an attempt" in explain_given_up([failed(0), failed(1)], 3, 3, ["job 3 FAILED"])
