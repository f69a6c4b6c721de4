"""Published traces of GPT and steps of T5-3B beside what is predicted of them from a machine's published numbers alone.

A seeded draw sets a third of the traces of GPT aside: no constant was chosen on them.
"""

import random
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from analysis.claims.published import read
from analysis.predictions import PredictionComparison, PredictionPoint, compute_error_percent, published_runs
from analysis.predictions.published_runs import PublishedRun
from bench.machine import Calibration

GPT_MEAN, T5_MEAN = 9.0, 15.0
"""Bounds of the mean of absolute errors, in percent; set before the formulas were written."""
SEED, SET_ASIDE = 20260, 3
"""Of the draw, and the part that it sets aside: one in so many."""
MISSED = 0.1
"""Share of steps that may lie outside of the predicted interval."""
GPT = (
    "Traces published with the simulator vTrain (`results/published/gpt_single_node_a100.csv`) for GPT on one node of"
    " 2 to 8 A100, in every layout of tensor, pipeline and data. They are given as measured steps, but no clock "
    "measured them: they are linear in the number of micro-batches to 9 parts in a million, put together from one "
    "trace of kernels for each width, tensor and micro-batch, as the simulator's source does it. So they are "
    "predicted at the rate of the best product, and say nothing of how close a predicted step is: see the published "
    "steps. The noise of a trace is in all rows that are made from it: with tensor 8 a micro-batch of 1 takes longer "
    "than one of 4. {part} {inside}"
)
TUNED = (
    "On these two thirds were chosen, within plausible ranges: the host's time of an operation, how it shares a pass "
    "with the device, what begins and ends a tile, the operations of an all-reduce, the passes over compiled scores, "
    "and the interval."
)
HOST_S = (10e-6, 35e-6)
"""Between which an operation of a module in Python lies (bench.predict.workload.USUAL)."""
LEFT_OUT = (
    "The same third without what this source says of the constant that decides most: the host's time of an operation "
    "is {host_us:g} µs, the middle of the 10 to 35 that are plausible without it. Of the other constants that were "
    "chosen here, two are the middles of their ranges; how host and device share a pass, what begins and ends a tile, "
    "and the interval of these traces remain those of this source."
)
LEFT_OUT_WHY = "What a host needs for an operation depends on its processor and its software: calibrate it."
ASIDE = "This third was set aside by a seeded draw, and no constant was chosen on it."
T5 = (
    "The steps of T5-3B on 1 to 20 nodes of the comparison of efficiencies above, here in seconds and from the "
    "machine's numbers alone: tensor parallelism of 2, micro-batches of 27 samples. The class of software is `fused`, "
    "whose pace was chosen on three sources, this one among them. {inside}"
)
INSIDE = (
    "Of {points} steps {share:.0f} % lie in the predicted interval, whose ends are a factor of {width:.2f} apart; "
    "interval score {score:.0f} % of a step (its width, and 20 times what a step lies beyond it)."
)
WHY = (
    "Most of the error is noise of single traces: with tensor 8 and micro-batches of 1, a third more than a host needs "
    "in any other row; with tensor 4, width 2048 and micro-batches of 2, a fourth less."
)
OUTSIDE = "outside of the predicted interval"


class PublishedStep(NamedTuple):
    """A published step and what is predicted of it, in seconds."""

    what: str
    step_s: float
    predicted_s: float
    low: float  # ends of the predicted interval
    high: float

    @property
    def inside(self) -> bool:
        return self.low <= self.step_s <= self.high

    @property
    def score(self) -> float:
        """Interval score over the step's time (doi 10.1198/016214506000001437): less is better."""
        beyond = max(0.0, self.low - self.step_s, self.step_s - self.high)
        return (self.high - self.low + 2 / MISSED * beyond) / self.step_s


def compare() -> list[PredictionComparison]:
    """Return the steps of GPT, those set aside apart, also with what they decided left out, and of T5."""
    steps = predict_gpt_steps()
    aside = draw_set_aside(len(steps))
    tuned = [step for place, step in enumerate(steps) if place not in aside]
    blind = [step for place, step in enumerate(steps) if place in aside]
    host_s = statistics.fmean(HOST_S)
    left_out = [step for place, step in enumerate(predict_gpt_steps(host_s)) if place in aside]
    without = _compare(
        "gpt_times_left_out", "GPT on one node of A100: traces, the source left out", left_out, GPT, GPT_MEAN,
        LEFT_OUT.format(host_us=1e6 * host_s),
    )  # fmt: skip
    return [
        _compare("gpt_times_aside", "GPT on one node of A100: traces, set aside", blind, GPT, GPT_MEAN, ASIDE),
        without._replace(why=LEFT_OUT_WHY),
        _compare("gpt_times", "GPT on one node of A100: traces", tuned, GPT, GPT_MEAN, TUNED),
        _compare("t5_times", "T5-3B on 1 to 20 nodes of 8 A100: step time", predict_t5_steps(), T5, T5_MEAN),
    ]


def draw_set_aside(rows: int) -> set[int]:
    """Return the places of the rows that no constant may be chosen on."""
    places = list(range(rows))
    random.Random(SEED).shuffle(places)
    return set(places[: rows // SET_ASIDE])


def predict_gpt_steps(host_s: float | None = None) -> list[PublishedStep]:
    """Return every row of GPT beside its prediction, of a host that needs `host_s` for an operation, if that is
    given."""
    machine = published_runs.build_burst_machine("A100-SXM-80")
    if host_s is not None:
        machine = machine.model_copy(update={"calibration": Calibration(kernel_s=host_s)})
    rows = read("gpt_single_node_a100").rows
    return [_predict_step(published_runs.build_gpt_run(row, machine), float(row["step_s"])) for row in rows]


def predict_t5_steps() -> list[PublishedStep]:
    """Return every row of T5-3B beside its prediction."""
    machine = published_runs.build_machine("A100-SXM-80")
    return [
        _predict_step(published_runs.build_t5_run(int(row["nodes"]), machine), float(row["s_per_step"]))
        for row in read("t5_3b_scaling_a100").rows
    ]


def _predict_step(run: PublishedRun, step_s: float) -> PublishedStep:
    found = run.predict()
    return PublishedStep(run.what, step_s, found.step_s, found.low_s, found.high_s)


def compute_coverage(steps: Sequence[PublishedStep]) -> float:
    """Return the share of steps that lie in their predicted interval."""
    return statistics.fmean(step.inside for step in steps)


def compute_width(steps: Sequence[PublishedStep]) -> float:
    """Return the factor between the ends of the predicted intervals, on average."""
    return statistics.geometric_mean(step.high / step.low for step in steps)


def _compare(
    name: str, title: str, steps: Sequence[PublishedStep], text: str, mean: float, part: str = ""
) -> PredictionComparison:
    inside = INSIDE.format(
        points=len(steps), share=100 * compute_coverage(steps), width=compute_width(steps),
        score=100 * statistics.fmean(step.score for step in steps),
    )  # fmt: skip
    points = tuple(
        PredictionPoint(
            step.what, step.predicted_s, step.step_s, compute_error_percent(step.predicted_s, step.step_s),
            "ok" if step.inside else "exception", "" if step.inside else OUTSIDE,
        )
        for step in steps
    )  # fmt: skip
    bound = f"mean {mean:g} %"
    return PredictionComparison(
        name, title, text.format(part=part, inside=inside), points, "s", mean=mean, bound=bound, excused=True, why=WHY
    )
