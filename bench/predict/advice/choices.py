"""Candidates with their step times, and the comparison of two candidates.

A candidate is a configuration that fits into memory. Its step time is measured if a run of the configuration exists.
Otherwise it is predicted, and corrected by runs of neighbouring configurations. All candidates of a question run on the
same machine. So they share two errors: the error of the machine's rates, and the error of the overlap of communication
with compute. One candidate is surely faster than another if it is faster at the low and at the high end of both errors.
For this comparison, the same errors are applied to both candidates.

If two candidates have the same engine, layout, micro-batch, checkpointing and adapter, these two shared errors are
their only errors. Otherwise each candidate also has an error of its own. This error is assumed as large as the error of
predictions from a rehearsal, in which one rank runs alone (REHEARSED). It is larger for an engine with work on the
host, because no calibrated rate includes this work.
"""

import itertools
from typing import Literal, NamedTuple

from bench import engines
from bench.core.spec import RunSpec
from bench.predict.advice.candidates import Candidate
from bench.predict.neighbours import MeasuredPoints, Neighbour, compute_correction, format_decisive
from bench.predict.step_time import COMPUTING, StepTime
from bench.predict.step_time.compute import CALIBRATED, REHEARSED
from bench.predict.step_time.network import MOVED

_DIGITS = 6  # decimals of the factors, so that equal factors compare equal in spite of rounding
SHOWN = 0.01
"""Smallest contribution to the difference between two step times that is printed. It is 1 % of the better step time."""


class StepEstimate(NamedTuple):
    """Estimated time of a step in seconds with its uncertainty interval, and the source of the estimate (`evidence`):
    measured, predicted, or predicted and corrected by measured runs of neighbouring configurations."""

    step_s: float
    low_s: float
    high_s: float
    evidence: Literal["measured", "corrected", "predicted"]
    runs: int = 0  # number of measured runs used


class Choice(NamedTuple):
    """A candidate with two step times. `time` is the prediction by formulas. `estimate` is the best estimate: the
    measured time if there is one, and otherwise the prediction, corrected by measured runs of similar configurations if
    there are any."""

    candidate: Candidate
    time: StepTime
    estimate: StepEstimate

    @property
    def spec(self) -> RunSpec:
        return self.candidate.spec

    @property
    def scale(self) -> float:
        """Best estimate of the step time, divided by the step time that formulas predict. It differs from 1 if measured
        runs of this or of similar configurations exist."""
        return self.estimate.step_s / self.time.step_s

    @property
    def computing_s(self) -> float:
        """Predicted seconds of computing in a step. They depend on the machine's calibrated or published rates."""
        return sum(seconds for name, seconds in self.time.parts.items() if name in COMPUTING)

    @property
    def rates(self) -> tuple[float, float]:
        """Smallest and largest ratio of true to predicted computing time. All candidates that are compared run on the
        same machine, so they share the error of its rates."""
        estimate, computing = self.estimate, self.computing_s
        if estimate.evidence == "corrected":
            return round(estimate.low_s / estimate.step_s, _DIGITS), round(estimate.high_s / estimate.step_s, _DIGITS)
        if not computing:
            return 1.0, 1.0
        predicted = self.time.step_s
        moved = [(factor - 1) * self.time.exposed_s for factor in MOVED]
        low = self.time.low_s - predicted - moved[0]
        high = self.time.high_s - predicted - moved[1] - self.time.hidden_s
        return round(1 + low / computing, _DIGITS), round(1 + high / computing, _DIGITS)

    @property
    def has_host_work(self) -> bool:
        """True if the engine works long on the host. No calibrated rate includes the time of this work; predictions for
        GPUs include it as it was on one host."""
        return engines.facts(self.spec).works_on_host

    def step_s(self, rate: float, *, overlapping: bool = True) -> float:
        """Return the seconds of a step if computing takes `rate` times as long as predicted. `overlapping=False`
        assumes that no communication overlaps with computing."""
        seconds = self.time.step_s + (rate - 1) * self.computing_s + (0 if overlapping else self.time.hidden_s)
        return self.scale * seconds


def choose(candidate: Candidate, known: MeasuredPoints, time: StepTime) -> Choice:
    """Return a candidate with the best estimate of its step time. The estimate is the measured time if the
    configuration was measured. Otherwise it is the prediction `time`, corrected by runs of neighbouring configurations
    if there are any."""
    if timed := known.timed.get(format_decisive(candidate.spec)) if known.timed else None:
        return Choice(candidate, time, StepEstimate(timed.step_s, timed.low_s, timed.high_s, "measured", timed.runs))
    if near_runs := known.near(candidate.spec.engine.name):
        return Choice(candidate, time, _correct_estimate(time.step_s, near_runs, candidate.spec.engine.name))
    return Choice(candidate, time, StepEstimate(time.step_s, time.low_s, time.high_s, "predicted"))


def _correct_estimate(step_s: float, near_runs: list[Neighbour], engine: str) -> StepEstimate:
    """Return a predicted step time multiplied by the mean measured-to-predicted ratio of neighbouring runs.

    The interval goes from the smallest to the largest of these ratios, and is widened at both ends by a prediction
    error. If all neighbours used the engine `engine`, this is the error of predictions from a rehearsal (REHEARSED).
    Otherwise it is the error of predictions from calibrated rates (CALIBRATED), which is larger.
    """
    ratios = [found.step for found in near_runs if found.step]
    doubt = REHEARSED if all(found.engine == engine for found in near_runs) else CALIBRATED
    low, high = doubt[0] * min(ratios), doubt[1] * max(ratios)
    likely = compute_correction(near_runs).step
    return StepEstimate(likely * step_s, low * step_s, high * step_s, "corrected", len(ratios))


def compute_price(choice: Choice, step_s: float, *, per_device: bool) -> float:
    """Return the seconds per token, or the device-seconds per token if `per_device`, of a choice whose step takes
    `step_s` seconds."""
    return step_s * (choice.spec.world_size if per_device else 1) / choice.time.tokens


def is_surely_faster(a: Choice, b: Choice, *, per_device: bool, weight: float = 1.0) -> bool:
    """Return True if `a` takes less time per token than `b` (fewer device-seconds if `per_device`) for all prediction
    errors within their ranges. Only the ends of the ranges are tested. `weight` is the number of tokens that the
    training needs with `b`, divided by the number of tokens that it needs with `a`."""
    if "measured" in (a.estimate.evidence, b.estimate.evidence) or a.rates != b.rates:
        high, low = a.estimate.high_s, b.estimate.low_s
        return compute_price(a, high, per_device=per_device) < weight * compute_price(b, low, per_device=per_device)
    most, least = _find_own_error(a, b)[1], _find_own_error(b, a)[0]
    return all(
        compute_price(a, a.step_s(rate * most, overlapping=overlapping), per_device=per_device)
        < weight * compute_price(b, b.step_s(rate * least, overlapping=overlapping), per_device=per_device)
        for rate, overlapping in itertools.product(a.rates, (True, False))
    )


def compute_worst_price(choice: Choice, *, per_device: bool) -> float:
    """Return the seconds per token of `choice` (device-seconds per token if `per_device`) in the worst case. For a
    measured or corrected step time, the worst case is the high end of the uncertainty interval.

    For a predicted step time, the predicted computing time is multiplied by the largest plausible ratio of true to
    predicted time. This ratio is the high end of CALIBRATED for an engine with work on the host, and of REHEARSED for
    any other engine. Errors that all candidates share are excluded, because they do not affect the order of candidates.
    """
    if choice.estimate.evidence != "predicted":
        return compute_price(choice, choice.estimate.high_s, per_device=per_device)
    own = CALIBRATED[1] if choice.has_host_work else REHEARSED[1]
    return compute_price(choice, choice.step_s(own), per_device=per_device)


def _find_own_error(choice: Choice, other: Choice) -> tuple[float, float]:
    """Return the smallest and largest ratio of true to predicted computing time of `choice`. Only errors that `other`
    does not share are considered. If both candidates have the same engine, layout, micro-batch, checkpointing and
    adapter, they share all errors, and both ratios are 1. Otherwise the ratios are those of REHEARSED, the error of
    predictions from a rehearsal.

    Exception: if only `choice` has an engine that works on the host (ZeRO stage 3), the largest ratio is that of
    CALIBRATED. CALIBRATED is the range of measured ratios over all engines. Its high end comes from ZeRO stage 3.
    """
    if _list_portions(choice) == _list_portions(other):
        return 1.0, 1.0
    alone = choice.has_host_work and not other.has_host_work
    # the measured ratios of engines without work on the host differ from each other by no more than REHEARSED
    return REHEARSED[0], CALIBRATED[1] if alone else REHEARSED[1]


def _list_portions(choice: Choice) -> tuple[object, ...]:
    spec = choice.spec
    return spec.engine, spec.parallel, spec.batch.micro, spec.activation_checkpointing, spec.adapter


def compute_extra_share(a: Choice, b: Choice, *, per_device: bool) -> float:
    """Return how much more time per token `b` takes than `a` (device-seconds if `per_device`), as a share of the time
    of `a`. The share is negative if `b` takes less time."""
    prices = [compute_price(one, one.estimate.step_s, per_device=per_device) for one in (a, b)]
    return prices[1] / prices[0] - 1


def explain_difference(a: Choice, b: Choice, *, per_device: bool) -> dict[str, float]:
    """Return a mapping with the parts of a step, such as `backward`, in which `b` takes longer per token than `a`. The
    value of a part is the extra time of `b` as a share of the whole step of `a`; the largest value comes first. If
    `per_device`, device-seconds are compared instead of seconds. Shares below SHOWN (1 %) are omitted."""
    whole = compute_price(a, a.estimate.step_s, per_device=per_device)
    ours, theirs = (
        {name: compute_price(c, c.scale * seconds, per_device=per_device) for name, seconds in c.time.parts.items()}
        for c in (a, b)
    )
    more = {name: (seconds - ours.get(name, 0.0)) / whole for name, seconds in theirs.items()}
    return dict(sorted(((k, v) for k, v in more.items() if v >= SHOWN), key=lambda part: -part[1]))
