"""Tests of the comparison of predictions with published step times: which rows were held out when the prediction was
developed, and the bounds on the errors of each comparison."""

import functools

import pytest

from analysis.validation import PredictionComparison, published_times, summarise_comparison
from analysis.validation.published_runs import PublishedStep, read_nemo_runs
from analysis.validation.published_times import draw_set_aside

INTERVAL = 1.5
"""Upper end of each predicted interval divided by its lower end, rounded up. The page prints a value that is 0.01
smaller."""


@functools.cache
def comparisons() -> dict[str, PredictionComparison]:
    return {found.name: found for found in published_times.compare_steps()}


def test_a_third_of_the_traces_is_held_out_reproducibly() -> None:
    assert len(draw_set_aside(720)) == 240
    assert draw_set_aside(720) == draw_set_aside(720)


@pytest.mark.parametrize(
    ("name", "points", "mean"), [("gpt_times", 480, 9.1), ("gpt_times_aside", 240, 10), ("t5_times", 6, 15)]
)
def test_errors_are_within_the_bound_and_most_steps_lie_in_the_interval(name: str, points: int, mean: float) -> None:
    found = comparisons()[name]
    summary = summarise_comparison(found)
    assert summary.points == points
    assert summary.mean is not None and summary.mean <= mean
    assert summary.exceptions <= 0.15 * points
    assert f"a factor of {INTERVAL - 0.01:.2f} apart" in found.text


def test_predictions_without_the_source_are_shorter_and_less_accurate() -> None:
    with_it, without = (comparisons()[name] for name in ("gpt_times_aside", "gpt_times_left_out"))
    assert [point.what for point in without.points] == [point.what for point in with_it.points]
    shorter = [(one.predicted, other.predicted) for one, other in zip(without.points, with_it.points, strict=True)]
    assert all(isinstance(one, float) and isinstance(other, float) and one < other for one, other in shorter)
    means = [summarise_comparison(found).mean for found in (with_it, without)]
    assert means[0] and means[1] and means[0] < means[1]


def test_predicted_time_is_the_median_of_measured_times() -> None:
    points = comparisons()["gpt_times_aside"].points
    above = sum((point.error or 0.0) > 0 for point in points) / len(points)
    assert 0.35 < above < 0.65


def test_interval_score_is_the_width_plus_20_times_the_distance_beyond_it() -> None:
    run = read_nemo_runs("t5_3b")[0]
    inside, beyond = (PublishedStep(run._replace(step_s=step_s), 1.0, 0.8, 1.2) for step_s in (1.0, 1.3))
    assert inside.score == pytest.approx(0.4)
    assert beyond.score == pytest.approx((0.4 + 20 * 0.1) / 1.3)
