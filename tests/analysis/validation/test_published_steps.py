"""Published steps compared with predictions: held-out sources, classes of software, and specs built from overrides."""

import functools

import pytest

from analysis.validation import published_steps, read_descriptions
from analysis.validation.published_runs import PublishedStep
from analysis.validation.published_steps import draw_sources_aside, summarise_sources
from bench.config import compose
from bench.predict.step_time import predict_step_time
from bench.predict.workload import SOFTWARE, USUAL

MEAN = read_descriptions()["published_steps_aside"]["mean"]
WIDTH = 1.8
"""Ratio of the high to the low end of the widest predicted interval, that of class `usual`."""


@functools.cache
def predictions() -> tuple[PublishedStep, ...]:
    return tuple(run.predict_step() for run in published_steps.read_runs())


def test_two_of_five_sources_are_set_aside_by_the_same_draw_every_time() -> None:
    assert draw_sources_aside() == {"MosaicML llm-foundry", "IBM fms-fsdp"}


def test_every_source_that_was_set_aside_is_within_the_bound_and_its_interval_holds_nine_in_ten() -> None:
    told = summarise_sources([one for one in predictions() if one.run.source in draw_sources_aside()])
    assert {source: errors.steps for source, errors in told.items()} == {"MosaicML llm-foundry": 209, "IBM fms-fsdp": 8}
    assert all(errors.mean <= MEAN and errors.inside >= 90 for errors in told.values())


def test_each_source_of_a_class_is_predicted_within_the_bound_by_the_pace_of_the_others() -> None:
    rows = [one.run for one in predictions() if one.run.software.name != USUAL.name]
    told = summarise_sources(published_steps.predict_left_out(rows))
    assert len(told) == 5
    assert all(errors.mean <= MEAN and errors.inside >= 80 for errors in told.values())


def test_named_classes_are_closer_than_unnamed_ones_and_the_usual_interval_is_the_widest() -> None:
    named = summarise_sources([one for one in predictions() if one.run.software.name != USUAL.name])
    unnamed = summarise_sources(
        [one.run.predict_step(USUAL) for one in predictions() if one.run.software.name != USUAL.name]
    )
    closer = [named[source].mean < unnamed[source].mean for source in named]
    assert all(closer)
    widths = {name: software.interval[1] / software.interval[0] for name, software in SOFTWARE.items()}
    assert widths["usual"] == pytest.approx(WIDTH) == max(widths.values())


@pytest.mark.parametrize(
    "source", ["MosaicML llm-foundry", "BigScience BLOOM", "torchtitan", "IBM fms-fsdp", "Databricks MI250",
               "DeepSpeed on A800", "Megatron by NVIDIA"]
)  # fmt: skip
def test_a_row_is_the_question_that_the_command_makes_of_its_overrides(source: str) -> None:
    overrides = [
        row["overrides"] for row in published_steps.read_published("published_steps").rows if row["source"] == source
    ][-1]
    asked = compose.compose_request(compose.parse_single([*overrides.split(), "launcher=slurm"]), None)
    spec, machine = published_steps.build_question(overrides)
    ours, theirs = (predict_step_time(*one) for one in ((spec, machine), (asked.spec, asked.machine)))
    assert ours.parts == theirs.parts
    assert machine.model_dump() == asked.machine.model_dump()
