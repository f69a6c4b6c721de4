"""Step times of real runs on the testbed beside those predicted, and the order of the stages by both."""

import itertools
from collections.abc import Iterator, Sequence

from analysis.predictions import PredictionComparison, PredictionPoint, compute_error_percent
from analysis.predictions.recorded import RecordedRuns
from analysis.predictions.testbed import FAST, SLOW, PredictedStep, predict_steps

MEAN, BEYOND = 10.0, 25.0
"""Percent: bound of the mean error, and of how far a prediction may lie beyond the measured interval."""
TEXT = (
    "The tiny T5 in fp32, stages 0–3 on 1 to 4 nodes of `slurm/testbed`, two allocations each, links of {rates} "
    "(`tests/data/studies/step_time.yaml`). {split} What a step computes comes from {computing} and the calibrated "
    "slowdown of ranks that share a processor; no step time was calibrated with. In brackets the measured interval: "
    "the range of two repeats, which holds the median with a probability of one half. 6·N·tokens: of one rank, at the "
    "rate of the best calibrated product."
)
BLIND = (
    "Nothing was measured at this rate but the steps themselves: collectives were calibrated (`zeroscale calibrate`) "
    "at 100 Mbit/s and 1 Gbit/s, chosen before anybody had looked at a step time."
)
SEEN = "Collectives were calibrated at these two rates."
INSIDE = (
    " {inside} of {points} steps took what was predicted of them with its doubt, whose width was read off the steps at "
    "the calibrated rates."
)
ALL = "Collectives were calibrated at the first and the last of them."
REHEARSALS = (
    "rehearsals of one rank alone on the machine (the median of three, after single ones had strayed by up to a third)"
)
RATES_ALONE = "calibrated rates of products, attention and memory alone"
HISTORY = (
    "The calibration of the slowdown was repeated with longer rounds, since its first values were impossible: four "
    "ranks on two cores cannot take less than twice as long. Its last repetition and the third rehearsals were made "
    "after a first comparison had shown outliers: with the calibration before and the first rehearsals alone the mean "
    "error at 400 Mbit/s was 12.8 %, the worst 35 %. What was measured again was chosen by that; no number was."
)
STAGE_3 = (
    "Stage 3 gathers and releases weights around every module in Python, which costs time that no rate of products, "
    "attention and memory holds: it is predicted a quarter to a third too fast where links are not what it waits for. "
    "A rehearsal pays it, and so do the tables above."
)
CLOSE = (
    "What is wrong are pairs whose times are close, closer than the errors of the times predicted: each row says by "
    "how much. With two repeats the measured intervals are ranges that hold the median with a probability of one half."
)
ORDER = (
    "Each pair of engines at each link rate and node count of the two tables above: which takes less time per step, "
    "where the measured intervals do not overlap."
)


def compare(recorded: RecordedRuns) -> list[PredictionComparison]:
    """Return the step times, first at the link rate that was not calibrated, and the order of the stages."""
    found = predict_steps(recorded)
    calibrated = [one for one in found if one.rate in (SLOW, FAST)]
    blind = [one for one in found if one.rate not in (SLOW, FAST)]
    by_rates = [one._replace(predicted_s=one.by_rates_s) for one in found]
    return [
        _compare_times(
            "step_times_blind",
            "at a link rate that was not calibrated",
            blind,
            BLIND + _format_inside(blind),
            REHEARSALS,
        ),
        _compare_times(
            "step_times",
            "at link rates that were calibrated",
            calibrated,
            SEEN + _format_inside(calibrated),
            REHEARSALS,
        ),
        _compare_times("step_times_by_rates", "without a rehearsal", by_rates, ALL, RATES_ALONE)._replace(why=STAGE_3),
        PredictionComparison(
            "stage_order",
            "Testbed: the order of the stages",
            ORDER,
            tuple(list_order_points(found)),
            bound="right wherever measured intervals do not overlap",
            why=CLOSE,
        ),
    ]


def _format_inside(found: Sequence[PredictedStep]) -> str:
    return INSIDE.format(inside=sum(one.inside for one in found), points=len(found))


def compute_distance_percent(predicted: float, low: float, high: float) -> float:
    """Return how far a value lies beyond an interval, signed, in percent of its nearer end; 0 inside."""
    return compute_error_percent(predicted, min(max(predicted, low), high))


def list_order_points(found: Sequence[PredictedStep]) -> Iterator[PredictionPoint]:
    """Yield each pair of engines at one link rate and node count: which is faster, where measured intervals tell."""
    for _, members in itertools.groupby(sorted(found, key=_build_sort_key), key=_build_sort_key):
        for one, other in itertools.combinations(members, 2):
            yield _build_pair_point(one, other)


def _compare_times(
    name: str, title: str, found: Sequence[PredictedStep], split: str, computing: str
) -> PredictionComparison:
    rates = ", ".join(dict.fromkeys(one.rate for one in found))
    text = f"{TEXT.format(rates=rates, split=split, computing=computing)} {HISTORY}"
    points = tuple(map(_build_time_point, found))
    bound = f"mean {MEAN:g} %; none more than {BEYOND:g} % beyond the measured interval"
    return PredictionComparison(
        name, f"Testbed: step time {title}", text, points, "s", mean=MEAN, bound=bound, rival="6·N·tokens"
    )  # fmt: skip


def _build_time_point(one: PredictedStep) -> PredictionPoint:
    outside = compute_distance_percent(one.predicted_s, one.low, one.high)
    right = abs(outside) <= BEYOND
    return PredictionPoint(
        f"{one.where}, {one.engine}", one.predicted_s, one.step_s, compute_error_percent(one.predicted_s, one.step_s),
        "ok" if right else "exception", "" if right else f"{outside:+z.0f} % beyond the measured interval",
        one.low, one.high, one.rule_of_thumb_s, compute_error_percent(one.rule_of_thumb_s, one.step_s),
    )  # fmt: skip


def _build_pair_point(one: PredictedStep, other: PredictedStep) -> PredictionPoint:
    what = f"{one.where}, {one.engine} and {other.engine}"
    predicted = _name_faster(one, other, one.predicted_s, other.predicted_s)
    if one.low <= other.high and other.low <= one.high:
        return PredictionPoint(what, predicted, None, verdict="not testable", reason="measured intervals overlap")
    truth = _name_faster(one, other, one.step_s, other.step_s)
    if predicted == truth:
        return PredictionPoint(what, predicted, truth)
    predicted_gap, measured_gap = (
        compute_error_percent(one.predicted_s, other.predicted_s),
        compute_error_percent(one.step_s, other.step_s),
    )
    reason = f"{one.engine} predicted {predicted_gap:+z.1f} %, measured {measured_gap:+z.1f} % beside {other.engine}"
    return PredictionPoint(what, predicted, truth, verdict="exception", reason=reason)


def _name_faster(one: PredictedStep, other: PredictedStep, ours: float, theirs: float) -> str:
    return f"{one.engine if ours < theirs else other.engine} is faster"


def _build_sort_key(one: PredictedStep) -> tuple[str, int]:
    return one.rate, one.nodes
