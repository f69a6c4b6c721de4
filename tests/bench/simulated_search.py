"""Helper for tests of searches for the best point of a grid. Each point that a search proposes is a trial. No trial is
run: a function gives its result at once."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.core.machine import Machine
from bench.core.quantities import MeasuredStep, RunQuantities
from bench.core.record import OutcomeKind
from bench.core.spec import RunSpec
from bench.core.study import SearchSection
from bench.sweep.definition import SweepPoint, Trial
from bench.sweep.forecast import Forecast, StepForecast
from bench.sweep.policy import Proposer, TrialResult
from bench.sweep.search.space import CandidatePool, SearchSpace, format_key

Run = Callable[[Mapping[str, Any]], float | OutcomeKind]
"""Function that simulates the run of a trial. It gets the trial's values, and returns the step time in seconds, or the
outcome of a failure."""

SPACE: dict[str, Any] = {"engine": ["ddp", "zero1", "zero3"], "batch.micro": [1, 2, 4, 8], "nodes": [1, 2, 4, 8]}
OVERRIDES = ("model=tiny", "batch.micro=2")
"""Overrides of every simulated point, which printed commands repeat."""


def section(space: Mapping[str, Any] = SPACE, **given: Any) -> SearchSection:
    return SearchSection.model_validate({"objective": "samples_per_s", "space": space, "trials": 1_000} | given)


def predict_nothing(values: Mapping[str, Any]) -> None:
    """Return no prediction for any point."""


def pool(asked: SearchSection, predict: Callable[[Mapping[str, Any]], float | None] = predict_nothing) -> CandidatePool:
    """Return the candidates of a search. `predict` gives the predicted step time of a point in seconds, or None."""

    def build(values: Mapping[str, Any]) -> SweepPoint:
        name, seconds, nodes = format_key(values), predict(values), values.get("nodes", 1)
        spec = {
            "model": {"name": "m", "family": "t5", "shape": {}},
            "engine": {"name": values["engine"], "backend": "ddp"},
            "data": {"name": "synthetic", "source": "synthetic"},
            "batch": {"micro": values["batch.micro"]},
            "nodes": nodes,
        }
        step = None if seconds is None else StepForecast(low_s=seconds, s=seconds, high_s=seconds)
        return SweepPoint(
            config_id=name,
            line=name,
            machine="cpu",
            nodes=nodes,
            devices_per_node=1,
            time_limit_min=1,
            forecast=Forecast(step=step),
            overrides=OVERRIDES,
            spec=RunSpec.model_validate(spec).model_dump(mode="json", by_alias=True),
        )

    return CandidatePool(asked, SearchSpace(asked), build, Machine(name="cpu", device="cpu"))


def answer(trial: Trial, run: Run, width: float = 0.01) -> TrialResult:
    """Return the result of a trial, with a step time or a failure from `run`. The uncertainty of the step time is ±
    `width`, as a share of the step time."""
    ended, spec = run(trial.values), trial.point.spec
    if isinstance(ended, str):
        return TrialResult(trial, ended, node_hours=0.01)
    samples = int(trial.values["batch.micro"]) * spec["nodes"]
    step = MeasuredStep(ended, ended * (1 - width), ended * (1 + width))
    return TrialResult(trial, "ok", RunQuantities(step, step, samples, None, spec["nodes"]), 0.01)


def search(
    asked: Proposer, run: Run, most: int, results: Sequence[TrialResult] = (), width: float = 0.01
) -> list[TrialResult]:
    """Continue the search of the proposer `asked`. `results` are the results of its earlier trials. `run` simulates
    each proposed trial. The simulated step time has an uncertainty of ± `width` times the step time. Stop when the
    search ends or has `most` trials. Return the results of all trials."""
    done = list(results)
    while len(done) < most and (proposal := asked.propose(done)):
        done.append(answer(Trial(number=len(done), **proposal._asdict()), run, width))
    return done
