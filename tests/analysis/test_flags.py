import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from records import MIB, failed, memory, run, run_table, spec, steps

from analysis.flags import FLAGS, list_flags, list_notes

SLOW_LINK = {"backend": "gloo", "payload_bytes": 8, "bus_bytes_per_s": 1.0, "nodes_bytes_per_s": (9.0, 9.0, 4.0)}
STEADY = tuple(0.5 + 0.0005 * (i % 2) for i in range(240))
MIXED = {"hosts": ("gpu01", "gpu04"), "slurm": {"SLURM_JOB_NODELIST": "gpu[01-02]"}}
MIXED_ELSEWHERE = {"hosts": ("gpu01", "gpu04"), "job": {"job_id": "a7", "nodelist": "gpu01,gpu02"}}
OWN = {"hosts": ("gpu01", "gpu02"), "slurm": {"SLURM_JOB_NODELIST": "gpu[01-02]"}}
SCATTERED = tuple(random.Random(i).uniform(0.5, 0.75) for i in range(240))
ALIKE = tuple(0.5 * (1 + 0.001 * math.sin(i / 8)) for i in range(240))


def test_undisturbed_run_has_no_flags_or_notes() -> None:
    assert list_flags(run(steps=steps(STEADY))) == list_notes(run(steps=steps(STEADY))) == ()


@pytest.mark.parametrize(
    ("flag", "observations"),
    [
        ("unsteady", {"steps": steps(STEADY, steady=False)}),
        ("skipped_steps", {"steps": steps(STEADY, skipped=(2, 9))}),
        ("memory_drift", {"steps": steps(STEADY), "memory": memory(2, drift=-0.011, resident_bytes=100 * MIB)}),
        ("straggler", {"steps": steps(STEADY), "outside_collectives_s": (0.1, 0.2)}),
        ("straggler", {"steps": steps(STEADY), "link": SLOW_LINK}),
        ("uninspected", {"steps": steps(STEADY), "uninspected": "the run ended before"}),
        ("drill", {"steps": steps(STEADY), "drill": "sleep:1"}),
        ("foreign_hosts", {"steps": steps(STEADY), "environment": MIXED}),
        ("foreign_hosts", {"steps": steps(STEADY), "environment": MIXED_ELSEWHERE}),
        (
            "busy",
            {"steps": steps(STEADY), "load": ({"node": 0}, {"node": 1, "others_share": 0.04, "stolen_share": 0.02})},
        ),
        ("busy", {"steps": steps(STEADY), "load": ({"node": 0, "throttled_s": 6.1},)}),  # of 120 s
        ("busy", {"steps": steps(STEADY), "load": ({"node": 0, "memory_pressure_share": 0.051},)}),
        ("busy", {"steps": steps(STEADY), "load": ({"node": 0, "io_pressure_share": 0.051},)}),
        ("busy", {"steps": steps(STEADY), "known_busy": "measured next to a build"}),
        ("busy", {"steps": steps(STEADY), "device_use": ({"rank": 1, "other_processes": 1},)}),
        ("dirty", {"steps": steps(STEADY), "environment": {"git": {"commit": "abc", "dirty": True}}}),
    ],
)
def test_each_condition_sets_exactly_its_flag(flag: str, observations: dict[str, Any]) -> None:
    assert list_flags(run(**observations)) == (flag,)


@pytest.mark.parametrize(
    "observations",
    [
        {"steps": steps((2.0, 2.002) * 15)},
        {"steps": steps(STEADY, skipped=(2,))},  # before the window
        {"steps": steps(STEADY), "memory": memory(2, drift=0.01, resident_bytes=200 * MIB)},
        {"steps": steps(STEADY), "memory": memory(2, drift=0.25, resident_bytes=4 * MIB)},
        {"steps": steps(STEADY), "outside_collectives_s": (0.10, 0.12)},
        {"steps": steps(STEADY), "environment": {"git": {"commit": "abc", "dirty": False}}},
        {"steps": steps(STEADY), "environment": OWN},
        {
            "steps": steps(STEADY),
            "load": (
                {"node": 0, "others_share": 0.03, "stolen_share": 0.02, "throttled_s": 5.9, "io_pressure_share": 0.05},
            ),
        },
        {"steps": steps(STEADY), "device_use": ({"rank": 0, "other_processes": 1, "other_bytes": 2**27},)},
    ],
)
def test_values_just_within_the_limits_set_no_flag(observations: dict[str, Any]) -> None:
    assert list_flags(run(**observations)) == ()


def test_short_windows_and_windows_of_few_steps() -> None:
    assert list_flags(run(steps=steps((3.0, 3.003) * 14))) == ("short",), "28 steps, in more than 60 s"
    assert list_flags(run(steps=steps(STEADY[:119]))) == ("short",), "less than 60 s, of many steps"
    assert list_flags(run(steps=steps(STEADY[:18]))) == ("short",)
    assert list_notes(run(steps=steps(STEADY[:18]))) == ("few",)


def test_trial_stopped_as_slower_is_flagged_short_and_ended_early() -> None:
    assert list_flags(run(steps=steps(STEADY[:18], stopped="slower"))) == ("short", "ended_early")


def test_run_with_a_change_of_level_in_its_window_is_unsteady() -> None:
    changed = (*STEADY[:80], *(1.05 * step for step in STEADY[80:]))
    assert list_flags(run(steps=steps(changed))) == ("unsteady",)
    assert list_notes(run(steps=steps(changed))) == ("wide", "few"), "its steps do not determine a mean"


def test_a_run_that_was_paused_is_flagged() -> None:
    record = run(steps=steps(STEADY))
    paused = record.outcome.model_copy(update={"evidence": {"paused_s": 15.2}})
    assert list_flags(record.model_copy(update={"outcome": paused})) == ("paused",)


@pytest.mark.parametrize(
    ("note", "step_s"),
    [
        ("few", ALIKE),  # 240 autocorrelated steps
        ("wide", SCATTERED),
        ("wide", STEADY[:5]),  # no interval at all, so no note `few`
    ],
)
def test_wide_intervals_are_notes_and_not_flags(note: str, step_s: Sequence[float]) -> None:
    record = run(steps=steps(step_s))
    assert list_notes(record) == (note,)
    assert set(list_flags(record)) <= {"short"}


def test_window_that_ended_by_time_before_its_steps_is_short() -> None:
    """The study requested more steps than the 240 that were measured before the time limit, so the run is `short`. In
    an older protocol, a window ended when the confidence interval of the step time was narrow enough, or at the time
    limit. A run with this protocol is not `short`."""
    assert list_flags(run(steps=steps(STEADY, stopped="time"))) == ("short",)
    assert list_flags(run(spec(measure={"width": 0.02}), steps=steps(STEADY, stopped="time"))) == ()


def with_longest(count: int, seconds: float) -> tuple[float, ...]:
    """Return a copy of the window STEADY (120 s) in which `count` steps take `seconds` longer."""
    return tuple(step + seconds * (number in range(100, 100 + count)) for number, step in enumerate(STEADY))


@pytest.mark.parametrize(
    ("step_s", "stalls"),
    [
        (with_longest(1, 30.0), True),
        (with_longest(2, 1.3), True),  # 2.6 of 122.6 s
        (with_longest(2, 1.1), False),  # 2.2 of 122.2 s
        (with_longest(12, 1.1), False),  # the longest 1 % are two
        (SCATTERED, False),
        (STEADY[:40], False),
    ],
)
def test_stall_is_a_note_with_its_step_and_seconds(step_s: Sequence[float], stalls: bool) -> None:
    row = run_table([run(steps=steps(step_s, cut=5))]).iloc[0]
    assert ("stall" in row["notes"].split()) is stalls
    assert (row["longest_step"], row["step_s_max"]) == (5 + step_s.index(max(step_s)), max(step_s))


def test_failure_has_no_flags_or_notes() -> None:
    assert list_flags(failed("oom")) == list_notes(failed("oom")) == ()


def test_table_joins_flags_in_a_fixed_order() -> None:
    table = run_table([run(steps=steps(STEADY[:5], steady=False), drill="x")])
    assert (table["flags"][0], table["notes"][0]) == ("drill short unsteady unverified", "wide")
    assert set(table["flags"][0].split()) <= set(FLAGS)
