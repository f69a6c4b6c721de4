"""Tests of the comparison of predictions with published step times: sources that were held out when the prediction was
developed, classes of software, and specs built from overrides."""

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
"""Upper end divided by lower end of the widest predicted interval. This is the interval for software of the class
`usual`."""


@functools.cache
def predictions() -> tuple[PublishedStep, ...]:
    return tuple(run.predict_step() for run in published_steps.read_runs())


def test_two_of_five_sources_are_held_out_reproducibly() -> None:
    assert draw_sources_aside() == {"MosaicML llm-foundry", "IBM fms-fsdp"}


def test_held_out_sources_are_within_the_bound_and_intervals_cover_90_percent() -> None:
    errors_by_source = summarise_sources([one for one in predictions() if one.run.source in draw_sources_aside()])
    assert {source: errors.steps for source, errors in errors_by_source.items()} == {
        "MosaicML llm-foundry": 209,
        "IBM fms-fsdp": 8,
    }
    assert all(errors.mean <= MEAN and errors.inside >= 90 for errors in errors_by_source.values())


def test_each_source_of_a_class_is_predicted_within_the_bound_from_the_other_sources() -> None:
    rows = [one.run for one in predictions() if one.run.software.name != USUAL.name]
    errors_by_source = summarise_sources(published_steps.predict_left_out(rows))
    assert len(errors_by_source) == 5
    assert all(errors.mean <= MEAN and errors.inside >= 80 for errors in errors_by_source.values())


def test_named_classes_have_smaller_errors_and_the_usual_interval_is_the_widest() -> None:
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
def test_published_row_has_the_prediction_of_the_command_with_its_overrides(source: str) -> None:
    overrides = [
        row["overrides"] for row in published_steps.read_published("published_steps").rows if row["source"] == source
    ][-1]
    composed = compose.compose_request(compose.parse_single([*overrides.split(), "launcher=slurm"]), None)
    spec, machine = published_steps.build_question(overrides)
    ours, theirs = (predict_step_time(*one) for one in ((spec, machine), (composed.spec, composed.machine)))
    assert ours.parts == theirs.parts
    assert machine.model_dump() == composed.machine.model_dump()
