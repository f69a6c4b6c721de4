import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from records import failed, memory, run, run_table, spec, steps

from analysis.flags import FLAGS, list_flags, list_notes

SLOW_LINK = {"backend": "gloo", "payload_bytes": 8, "bus_bytes_per_s": 1.0, "nodes_bytes_per_s": (9.0, 9.0, 4.0)}
STEADY = tuple(0.1 + 0.0001 * (i % 2) for i in range(240))
MIXED = {"hosts": ("gpu01", "gpu04"), "slurm": {"SLURM_JOB_NODELIST": "gpu[01-02]"}}
MIXED_ELSEWHERE = {"hosts": ("gpu01", "gpu04"), "job": {"job_id": "a7", "nodelist": "gpu01,gpu02"}}
OWN = {"hosts": ("gpu01", "gpu02"), "slurm": {"SLURM_JOB_NODELIST": "gpu[01-02]"}}
SCATTERED = tuple(random.Random(i).uniform(0.1, 0.13) for i in range(240))
ALIKE = tuple(0.1 * (1 + 0.001 * math.sin(i / 8)) for i in range(240))


def test_a_good_run_carries_none() -> None:
    assert list_flags(run(steps=steps(STEADY))) == list_notes(run(steps=steps(STEADY))) == ()


@pytest.mark.parametrize(
    ("flag", "observations"),
    [
        ("unsteady", {"steps": steps(STEADY, steady=False)}),
        ("skipped_steps", {"steps": steps(STEADY, skipped=(2, 9))}),
        ("memory_drift", {"steps": steps(STEADY), "memory": memory(2, drift=-0.011)}),
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
        ("busy", {"steps": steps(STEADY), "load": ({"node": 0, "throttled_s": 1.3},)}),  # of 24 s
        ("busy", {"steps": steps(STEADY), "device_use": ({"rank": 1, "other_processes": 1},)}),
        ("dirty", {"steps": steps(STEADY), "environment": {"git": {"commit": "abc", "dirty": True}}}),
    ],
)
def test_each_doubt_raises_its_flag_and_no_other(flag: str, observations: dict[str, Any]) -> None:
    assert list_flags(run(**observations)) == (flag,)


@pytest.mark.parametrize(
    "observations",
    [
        {"steps": steps((1.0, 1.001) * 15)},
        {"steps": steps(STEADY, skipped=(2,))},  # before the window
        {"steps": steps(STEADY), "memory": memory(2, drift=0.01)},
        {"steps": steps(STEADY), "outside_collectives_s": (0.10, 0.12)},
        {"steps": steps(STEADY), "environment": {"git": {"commit": "abc", "dirty": False}}},
        {"steps": steps(STEADY), "environment": OWN},
        {
            "steps": steps(STEADY),
            "load": ({"node": 0, "others_share": 0.03, "stolen_share": 0.02, "throttled_s": 1.1},),
        },
        {"steps": steps(STEADY), "device_use": ({"rank": 0, "other_processes": 1, "other_bytes": 2**27},)},
    ],
)
def test_what_is_just_good_enough_raises_none(observations: dict[str, Any]) -> None:
    assert list_flags(run(**observations)) == ()


def test_a_short_window_may_be_of_few_steps_too() -> None:
    assert list_flags(run(steps=steps((1.2, 1.201) * 14))) == ("short",), "28 steps, in more than 20 s"
    assert list_flags(run(steps=steps(STEADY[:199]))) == ("short",), "less than 20 s, of many steps"
    assert list_flags(run(steps=steps(STEADY[:18]))) == ("short",)
    assert list_notes(run(steps=steps(STEADY[:18]))) == ("few",)


def test_a_trial_that_could_not_win_says_why_its_window_is_short() -> None:
    assert list_flags(run(steps=steps(STEADY[:18], stopped="slower"))) == ("short", "ended_early")


def test_a_change_within_the_window_is_unsteady_too() -> None:
    changed = (*STEADY[:80], *(1.008 * step for step in STEADY[80:]))
    assert list_flags(run(steps=steps(changed))) == ("unsteady",)
    assert list_notes(run(steps=steps(changed))) == ("wide",), "its steps tell no median"


def test_a_run_that_was_paused_is_flagged() -> None:
    record = run(steps=steps(STEADY))
    paused = record.outcome.model_copy(update={"evidence": {"paused_s": 15.2}})
    assert list_flags(record.model_copy(update={"outcome": paused})) == ("paused",)


@pytest.mark.parametrize(
    ("note", "step_s"),
    [
        ("few", ALIKE),  # 240 steps, neighbours alike
        ("wide", SCATTERED),
        ("wide", STEADY[:5]),  # no interval at all: there is none that could cover less
    ],
)
def test_width_is_no_doubt_and_stands_in_notes(note: str, step_s: Sequence[float]) -> None:
    record = run(steps=steps(step_s))
    assert list_notes(record) == (note,)
    assert set(list_flags(record)) <= {"short"}


def test_width_is_what_the_protocol_asked() -> None:
    assert list_notes(run(spec(measure={"width": 0.2}), steps=steps(SCATTERED))) == ()


def test_a_failure_has_no_window_to_doubt() -> None:
    assert list_flags(failed("oom")) == list_notes(failed("oom")) == ()


def test_the_table_joins_flags_in_one_order() -> None:
    table = run_table([run(steps=steps(STEADY[:5], steady=False), drill="x")])
    assert (table["flags"][0], table["notes"][0]) == ("drill short unsteady unverified", "wide")
    assert set(table["flags"][0].split()) <= set(FLAGS)
