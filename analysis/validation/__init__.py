"""Predictions compared with recorded and published numbers. Each comparison has one table, and a description in
`comparisons.yaml`.

No point is omitted. A point whose error exceeds the bound is an `exception`. A point is `not testable` if the recorded
facts do not determine whether its prediction is right. In both cases the point has a reason. An error is the prediction
divided by the truth, minus 1, with its sign. Its unit is percent unless a comparison has another unit.
"""

import functools
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

Verdict = Literal["ok", "exception", "not testable"]
Result = Literal["holds", "missed", "nothing to compare"]
Value = float | str | None
OUTSIDE = "outside of the predicted interval"


class PredictionPoint(NamedTuple):
    """One point of a comparison: a prediction and the true value, which was measured or published. Both are numbers in
    the comparison's unit, or both are texts such as `fits`.

    `build_comparison` computes the errors of a point, and its verdict if the comparison has a bound for each point.
    """

    what: str
    predicted: Value
    truth: Value
    error: float | None = None
    verdict: Verdict = "ok"
    reason: str = ""  # reason of an exception, or of a point that is not testable
    truth_low: float | None = None  # measured interval, if there is one
    truth_high: float | None = None
    rival: Value = None  # prediction by the usual formula, such as DeepSpeed's estimator; None if there is none
    rival_error: float | None = None


class PredictionComparison(NamedTuple):
    """A comparison of predictions with true values. It has points (pairs of a predicted and a true value), one
    description of them all, and bounds on the errors of the predictions. The bounds were set before anything was
    compared."""

    name: str  # name of its file
    title: str
    text: str  # description of predictions, truth and their sources
    points: tuple[PredictionPoint, ...]
    unit: str = ""  # bytes, s, …; empty for words and shares
    error_unit: str = "%"
    each: float | None = None  # bound of every point's error
    mean: float | None = None  # bound of the mean of absolute errors
    bound: str = ""  # bound as text, if it cannot be given as a number
    rival: str = ""  # name of the usual formula
    excused: bool = False  # True if exceptions are allowed, provided that each has a reason
    why: str = ""  # reason for a missed bound


class ComparisonSummary(NamedTuple):
    """Summary of a comparison: the verdict, the numbers of points, and the errors of the predictions. Errors are None
    if predictions and true values are texts, such as `fits`."""

    points: int
    exceptions: int
    not_testable: int
    mean: float | None  # mean of absolute errors
    low: float | None
    high: float | None
    rival_mean: float | None
    verdict: Result


@functools.cache
def read_descriptions() -> dict[str, dict[str, Any]]:
    """Return the descriptions of all comparisons by name, from `comparisons.yaml`."""
    text = (Path(__file__).parent / "comparisons.yaml").read_text(encoding="utf-8")
    return {name: dict(description) for name, description in yaml.safe_load(text).items()}


def build_comparison(name: str, points: Iterable[PredictionPoint], **values: Any) -> PredictionComparison:
    """Return a comparison of these points with its description from `comparisons.yaml`. `values` replace the
    placeholders in the description's text."""
    described = read_descriptions()[name]
    text = described["text"].format(**values).rstrip()
    judged = (judge_point(one, described.get("each"), described.get("error_unit", "%")) for one in points)
    return PredictionComparison(name, points=tuple(judged), **{**described, "text": text})


def judge_point(point: PredictionPoint, each: float | None, error_unit: str = "%") -> PredictionPoint:
    """Return a copy of a point with its errors in `error_unit`. If the absolute error exceeds the bound `each`, the
    verdict becomes `exception`. `point.reason` explains a possible exception, and is removed if the verdict is `ok`."""
    if point.verdict == "not testable":
        return point
    error, rival_error = (_compute_error(one, point.truth, error_unit) for one in (point.predicted, point.rival))
    beyond = error is not None and each is not None and abs(error) > each
    verdict: Verdict = "exception" if beyond else point.verdict
    reason = "" if verdict == "ok" else point.reason
    return point._replace(error=error, rival_error=rival_error, verdict=verdict, reason=reason)


def _compute_error(predicted: Value, truth: Value, unit: str) -> float | None:
    """Return the signed error of a prediction, in percent of the truth or as a difference; None for texts."""
    if not isinstance(predicted, float | int) or not isinstance(truth, float | int):
        return None
    return compute_error_percent(predicted, truth) if unit == "%" else predicted - truth


def compute_error_percent(predicted: float, truth: float) -> float:
    """Return the signed error of a prediction, in percent of the truth."""
    return (predicted - truth) / truth * 100


def judge(right: bool) -> Verdict:
    """Return the verdict on a point: `ok` if its prediction is right, otherwise `exception`."""
    return "ok" if right else "exception"


def summarise_comparison(comparison: PredictionComparison) -> ComparisonSummary:
    """Return the summary of a comparison: its verdict, the numbers of points, and the errors of the predictions."""
    points = comparison.points
    errors = [point.error for point in points if point.error is not None]
    rivals = [abs(point.rival_error) for point in points if point.rival_error is not None]
    mean = statistics.fmean(map(abs, errors)) if errors else None
    wrong = [point for point in points if point.verdict == "exception"]
    within_bounds = mean is None or comparison.mean is None or mean <= comparison.mean
    within_bounds &= comparison.excused and all(point.reason for point in wrong) if wrong else True
    undecided = sum(point.verdict == "not testable" for point in points)
    verdict: Result = "nothing to compare" if undecided == len(points) else "holds" if within_bounds else "missed"
    rival_mean = statistics.fmean(rivals) if rivals else None
    low, high = min(errors, default=None), max(errors, default=None)
    return ComparisonSummary(len(points), len(wrong), undecided, mean, low, high, rival_mean, verdict)
