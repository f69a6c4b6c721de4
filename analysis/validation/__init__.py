"""Predictions compared with recorded and published numbers: one table per comparison, described in `comparisons.yaml`.

No point is omitted. A point that misses its bound is an exception, and a point that the recorded facts do not decide is
`not testable`; both have a reason. Errors are signed: prediction over truth minus 1, in percent unless a comparison has
another unit.
"""

import functools
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

Verdict = Literal["ok", "exception", "not testable"]
Value = float | str | None
OUTSIDE = "outside of the predicted interval"


class PredictionPoint(NamedTuple):
    """One prediction and its truth: two numbers in the comparison's unit, or two words."""

    what: str
    predicted: Value
    truth: Value
    error: float | None = None
    verdict: Verdict = "ok"
    reason: str = ""  # of an exception, or of a point that is not testable
    truth_low: float | None = None  # measured interval, where there is one
    truth_high: float | None = None
    rival: Value = None  # prediction of the usual formula; None where it has none
    rival_error: float | None = None


class PredictionComparison(NamedTuple):
    """A set of points with one description, and the bounds that were set before the comparison."""

    name: str  # of its file
    title: str
    text: str  # predictions, truth and their sources
    points: tuple[PredictionPoint, ...]
    unit: str = ""  # bytes, s, …; empty for words and shares
    error_unit: str = "%"
    each: float | None = None  # bound of every point's error
    mean: float | None = None  # bound of the mean of absolute errors
    bound: str = ""  # in words, where numbers are not enough
    rival: str = ""  # source of the usual formula
    excused: bool = False  # whether an explained exception keeps the bound
    why: str = ""  # reason for a missed bound


class ComparisonSummary(NamedTuple):
    """A comparison in one line; errors are None where its points are words."""

    points: int
    exceptions: int
    not_testable: int
    mean: float | None  # of absolute errors
    low: float | None
    high: float | None
    rival_mean: float | None
    verdict: Literal["holds", "missed", "nothing to compare"]


@functools.cache
def read_descriptions() -> dict[str, dict[str, Any]]:
    """Return the description of every comparison by its name."""
    text = (Path(__file__).parent / "comparisons.yaml").read_text(encoding="utf-8")
    return {name: dict(description) for name, description in yaml.safe_load(text).items()}


def build_comparison(name: str, points: Iterable[PredictionPoint], **values: Any) -> PredictionComparison:
    """Return a comparison with its description; `values` fill in the names in its text."""
    described = read_descriptions()[name]
    text = described["text"].format(**values).rstrip()
    return PredictionComparison(name, points=tuple(points), **{**described, "text": text})


def compute_error_percent(predicted: float, truth: float) -> float:
    """Return the signed error of a prediction, in percent of the truth."""
    return (predicted - truth) / truth * 100


def build_point(
    what: str, predicted: float, truth: float, each: float, rival: float | None = None, reason: str = ""
) -> PredictionPoint:
    """Return a point that is right within `each` percent; `reason` explains the exception it may be."""
    error = compute_error_percent(predicted, truth)
    right = abs(error) <= each
    return PredictionPoint(
        what, predicted, truth, error, "ok" if right else "exception", "" if right else reason,
        rival=rival, rival_error=None if rival is None else compute_error_percent(rival, truth),
    )  # fmt: skip


def build_interval_point(what: str, predicted: float, truth: float, *, inside: bool) -> PredictionPoint:
    """Return a point that is right if the truth lies inside the predicted interval."""
    error = compute_error_percent(predicted, truth)
    return PredictionPoint(what, predicted, truth, error, "ok" if inside else "exception", "" if inside else OUTSIDE)


def summarise_comparison(comparison: PredictionComparison) -> ComparisonSummary:
    """Return the errors and the verdict of a comparison."""
    points = comparison.points
    errors = [point.error for point in points if point.error is not None]
    rivals = [abs(point.rival_error) for point in points if point.rival_error is not None]
    mean = statistics.fmean(map(abs, errors)) if errors else None
    wrong = [point for point in points if point.verdict == "exception"]
    within_bounds = mean is None or comparison.mean is None or mean <= comparison.mean
    within_bounds &= comparison.excused and all(point.reason for point in wrong) if wrong else True
    undecided = sum(point.verdict == "not testable" for point in points)
    return ComparisonSummary(
        len(points),
        len(wrong),
        undecided,
        mean,
        min(errors, default=None),
        max(errors, default=None),
        statistics.fmean(rivals) if rivals else None,
        "nothing to compare" if undecided == len(points) else "holds" if within_bounds else "missed",
    )
