"""Candidates with the time of their step: measured where a run says it, else predicted, corrected by its neighbours."""

from typing import Literal, NamedTuple

from bench.predict.advice.candidates import Candidate
from bench.predict.advice.measured import MeasuredPoints, format_decisive
from bench.predict.neighbours import Neighbour, compute_correction
from bench.predict.step_time import COMPUTING, StepTime
from bench.predict.step_time.compute import CALIBRATED, REHEARSED
from bench.predict.step_time.network import MOVED
from bench.spec import RunSpec

_DIGITS = 6  # of factors that are the same but for rounding


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
