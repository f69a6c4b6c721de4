"""Candidates with the time of their step, and the comparison of two of them.

The time is measured where a run exists, else predicted and corrected by its neighbours.

All points of a question share the machine, so they share the doubt about its rates and about how well communication
hides behind compute: one is called faster if it is so at both ends of both doubts, the same for both points. What one
engine computes in equal portions (micro-batch and checkpointing) cancels then. Where engine or portions differ, each
may still be off by what a rehearsal leaves in doubt, and an engine with work on the host, which no rate knows, by more.
"""

import itertools
from typing import Literal, NamedTuple

from bench import engines
from bench.core.spec import RunSpec
from bench.predict.advice.candidates import Candidate
from bench.predict.advice.measured import MeasuredPoints, format_decisive
from bench.predict.neighbours import Neighbour, compute_correction
from bench.predict.step_time import COMPUTING, StepTime
from bench.predict.step_time.compute import CALIBRATED, REHEARSED
from bench.predict.step_time.network import MOVED

_DIGITS = 6  # of factors that are the same but for rounding
SHOWN = 0.01
"""Share of the better one's step below which a part of it explains nothing."""


class StepEstimate(NamedTuple):
    """Seconds of a step, and what they stand on."""

    step_s: float
    low_s: float
    high_s: float
    evidence: Literal["measured", "corrected", "predicted"]
    runs: int = 0  # measured ones behind it


class Choice(NamedTuple):
    """A candidate, what formulas say of its step, and what is to be believed of it."""

    candidate: Candidate
    time: StepTime
    estimate: StepEstimate

    @property
    def spec(self) -> RunSpec:
        return self.candidate.spec

    @property
    def scale(self) -> float:
        """What is believed over what formulas say."""
        return self.estimate.step_s / self.time.step_s

    @property
    def computing_s(self) -> float:
        """Predicted seconds of a step that depend on the machine's rates."""
        return sum(seconds for name, seconds in self.time.parts.items() if name in COMPUTING)

    @property
    def rates(self) -> tuple[float, float]:
        """How much longer it may compute than predicted, at least and at most; the doubt of all points of a machine."""
        believed = self.estimate
        if believed.evidence == "corrected":
            return round(believed.low_s / believed.step_s, _DIGITS), round(believed.high_s / believed.step_s, _DIGITS)
        if not self.computing_s:
            return 1.0, 1.0
        known, computing = self.time.step_s, self.computing_s
        moved = [(factor - 1) * self.time.exposed_s for factor in MOVED]
        low = self.time.low_s - known - moved[0]
        high = self.time.high_s - known - moved[1] - self.time.hidden_s
        return round(1 + low / computing, _DIGITS), round(1 + high / computing, _DIGITS)

    def step_s(self, rate: float, *, overlapping: bool = True) -> float:
        """Return the seconds of a step if computing takes `rate` times as long as predicted, and if communication
        hides behind it as predicted or not at all."""
        seconds = self.time.step_s + (rate - 1) * self.computing_s + (0 if overlapping else self.time.hidden_s)
        return self.scale * seconds


def choose(candidate: Candidate, known: MeasuredPoints, time: StepTime) -> Choice:
    """Return a candidate with what is to be believed of its step, which is predicted to take `time`."""
    if timed := known.timed.get(format_decisive(candidate.spec)) if known.timed else None:
        return Choice(candidate, time, StepEstimate(timed.step_s, timed.low_s, timed.high_s, "measured", timed.runs))
    near_runs = known.near(candidate.spec.engine.name)
    if near_runs:
        return Choice(candidate, time, _correct_estimate(time.step_s, near_runs, candidate.spec.engine.name))
    return Choice(candidate, time, StepEstimate(time.step_s, time.low_s, time.high_s, "predicted"))


def _correct_estimate(step_s: float, near_runs: list[Neighbour], engine: str) -> StepEstimate:
    """Scale a prediction by how far those of its neighbours were off. Beside the spread of these, one from the same
    engine leaves the doubt of a rehearsal, one from another that of the rates."""
    ratios = [found.step for found in near_runs if found.step]
    doubt = REHEARSED if all(found.engine == engine for found in near_runs) else CALIBRATED
    low, high = doubt[0] * min(ratios), doubt[1] * max(ratios)
    return StepEstimate(
        compute_correction(near_runs).step * step_s, low * step_s, high * step_s, "corrected", len(ratios)
    )


def compute_price(choice: Choice, step_s: float, *, per_device: bool) -> float:
    """Return seconds per token, or device-seconds per token."""
    return step_s * (choice.spec.world_size if per_device else 1) / choice.time.tokens


def is_surely_faster(a: Choice, b: Choice, *, per_device: bool, weight: float = 1.0) -> bool:
    """Whether `a` takes less time per token (and device) than `b`, whatever the doubt, if a token of `b` counts for
    `weight` of `a`'s."""
    if "measured" in (a.estimate.evidence, b.estimate.evidence) or a.rates != b.rates:
        high, low = a.estimate.high_s, b.estimate.low_s
        return compute_price(a, high, per_device=per_device) < weight * compute_price(b, low, per_device=per_device)
    most, least = _find_own_doubt(a, b)[1], _find_own_doubt(b, a)[0]
    return all(
        compute_price(a, a.step_s(rate * most, overlapping=overlapping), per_device=per_device)
        < weight * compute_price(b, b.step_s(rate * least, overlapping=overlapping), per_device=per_device)
        for rate, overlapping in itertools.product(a.rates, (True, False))
    )


def compute_worst_price(choice: Choice, *, per_device: bool) -> float:
    """Return what `choice` takes per token (and device) if what is in doubt of it alone turns out badly."""
    if choice.estimate.evidence != "predicted":
        return compute_price(choice, choice.estimate.high_s, per_device=per_device)
    own = CALIBRATED[1] if _has_host_work(choice) else REHEARSED[1]
    return compute_price(choice, choice.step_s(own), per_device=per_device)


def _find_own_doubt(choice: Choice, other: Choice) -> tuple[float, float]:
    """Return how much longer `choice` may compute than predicted without `other` doing so as well, least and most.

    CALIBRATED is what was seen of all engines, its high end of the one that works on the host, ZeRO's stage 3; the
    others were within a rehearsal's doubt of each other.
    """
    if _list_portions(choice) == _list_portions(other):
        return 1.0, 1.0
    alone = _has_host_work(choice) and not _has_host_work(other)
    return REHEARSED[0], CALIBRATED[1] if alone else REHEARSED[1]


def _list_portions(choice: Choice) -> tuple[object, ...]:
    spec = choice.spec
    return spec.engine, spec.parallel, spec.batch.micro, spec.activation_checkpointing


def _has_host_work(choice: Choice) -> bool:
    return engines.facts(choice.spec).works_on_host


def compute_extra_share(a: Choice, b: Choice, *, per_device: bool) -> float:
    """Return how much more `b` takes per token (and device) than `a`, as a share."""
    return _compute_likely_price(b, per_device) / _compute_likely_price(a, per_device) - 1


def explain_difference(a: Choice, b: Choice, *, per_device: bool) -> dict[str, float]:
    """Return the parts in which `b` takes longer per token (and device), largest first, as shares of `a`'s step."""
    whole = _compute_likely_price(a, per_device)
    ours, theirs = (
        {name: compute_price(c, c.scale * seconds, per_device=per_device) for name, seconds in c.time.parts.items()}
        for c in (a, b)
    )
    more = {name: (seconds - ours.get(name, 0.0)) / whole for name, seconds in theirs.items()}
    return dict(sorted(((k, v) for k, v in more.items() if v >= SHOWN), key=lambda part: -part[1]))


def _compute_likely_price(choice: Choice, per_device: bool) -> float:
    return compute_price(choice, choice.estimate.step_s, per_device=per_device)
