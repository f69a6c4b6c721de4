"""Tests of the comparison of predictions with published memory and times of training with adapters. The number of
trained parameters must be right, and no published row may be omitted."""

import pytest

from analysis.claims.sources import read_published
from analysis.validation import published_adapters
from analysis.validation.published_steps import build_question
from analysis.validation.recorded import find_recorded_runs
from bench.core.network import count_trained_parameters
from bench.predict.workload import get_network

ROWS = read_published("adapters").rows


@pytest.mark.parametrize("row", [row for row in ROWS if row["trainable"]], ids=lambda row: row["what"])
def test_trained_parameters_equal_the_published_number(row: dict[str, str]) -> None:
    spec, _ = build_question(row["overrides"])
    assert count_trained_parameters(get_network(spec)) == int(row["trainable"])


def test_each_published_row_is_a_point_with_an_address() -> None:
    *found, rehearsed = published_adapters.compare(find_recorded_runs())
    assert sum(len(one.points) for one in found) == len(ROWS)
    assert {point.what for point in rehearsed.points} < {point.what for one in found for point in one.points}
    assert all(row["address"] and row["date"] and (row["overrides"] or row["not_testable"]) for row in ROWS)


def test_held_out_sources_are_held_out_completely() -> None:
    aside, kept = ({row["source"] for row in ROWS if row["aside"] == flag} for flag in ("true", "false"))
    assert (aside, kept) == ({"torchtune", "Unsloth", "fsdp_qlora"}, {"PEFT", "litgpt"})
