"""What was predicted beside what came true: one file per comparison, each from recorded numbers to points.

No point is left out: what misses its bound is an exception, and what the recorded facts do not decide is `not
testable`; both say why. Errors are signed: predicted beyond true, in percent of the true value unless a comparison says
otherwise.
"""

import statistics
from typing import Literal, NamedTuple

Verdict = Literal["ok", "exception", "not testable"]
Value = float | str | None


class PredictionPoint(NamedTuple):
    """One prediction and its truth, both a number in the comparison's unit or both words."""

    what: str
    predicted: Value
    truth: Value
    error: float | None = None
    verdict: Verdict = "ok"
    reason: str = ""  # of an exception, or why nothing can be told
    truth_low: float | None = None  # measured interval, where there is one
    truth_high: float | None = None
    rival: Value = None  # what the usual formula says of this point; None where it says nothing
    rival_error: float | None = None


class PredictionComparison(NamedTuple):
    """A set of points that one sentence describes, with the bounds that were set before anybody looked."""

    name: str  # of its file
    title: str
    text: str  # what is compared with what, and where that comes from
    points: tuple[PredictionPoint, ...]
    unit: str = ""  # bytes, s, …; empty for words and shares
    error_unit: str = "%"
    each: float | None = None  # bound of every point's error
    mean: float | None = None  # bound of the mean of absolute errors
    bound: str = ""  # in words, where numbers do not say it
    rival: str = ""  # whose formula is beside it
    excused: bool = False  # whether an exception that is explained keeps the bound
    why: str = ""  # what misses its bound, and why


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


def compute_error_percent(predicted: float, truth: float) -> float:
    """Return how far a prediction lies above the truth, in percent of it."""
    return (predicted - truth) / truth * 100


def build_point(
    what: str, predicted: float, truth: float, each: float, rival: float | None = None, reason: str = ""
) -> PredictionPoint:
    """Return a point that is right within `each` percent; `reason` is that of the exception it may be."""
    error = compute_error_percent(predicted, truth)
    right = abs(error) <= each
    return PredictionPoint(
        what, predicted, truth, error, "ok" if right else "exception", "" if right else reason,
        rival=rival, rival_error=None if rival is None else compute_error_percent(rival, truth),
    )  # fmt: skip


def summarise_comparison(comparison: PredictionComparison) -> ComparisonSummary:
    """Return what the points of a comparison come to."""
    points = comparison.points
    errors = [point.error for point in points if point.error is not None]
    rivals = [abs(point.rival_error) for point in points if point.rival_error is not None]
    mean = _compute_mean([abs(error) for error in errors])
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
        _compute_mean(rivals),
        "nothing to compare" if undecided == len(points) else "holds" if within_bounds else "missed",
    )


def _compute_mean(values: list[float]) -> float | None:
    return statistics.fmean(values) if values else None
