"""What holds for every record, whatever was measured: what is derived from one needs no guards of its own.

The types say most of it. Here stands what lies between fields, and the ranges that keep sums, products and squares of
measured numbers finite.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from bench.core.record import SCHEMA_VERSION, Observations, RunRecord, Steps

LEAST_S, MOST_S = 1e-9, 1e9  # of one step
MOST = 2**53  # of counts and of tokens: whole numbers up to here are exact as floats
MOST_SIZE = 2**31  # of one dimension of a model


def find_broken_rule(record: RunRecord) -> str | None:
    """Return the first rule that a record breaks, with the field that breaks it; None for one that keeps them all."""
    return (
        _check_version(record)
        or _check_sizes(record)
        or _check_outcome(record)
        or (_check_observations(record.observations) if record.observations else None)
        or _check_plain(record)
    )


def _check_version(record: RunRecord) -> str | None:
    same = record.schema_version == SCHEMA_VERSION
    return None if same else f"schema_version: {record.schema_version} twice in one record"


def _check_sizes(record: RunRecord) -> str | None:
    spec, counted = record.spec, record.observations
    if spec.global_batch * max(spec.sequence.values(), default=0) > MOST:
        return "spec: more samples or tokens per step than can be counted"
    if max(spec.model.parameters or 0, counted.parameters if counted else 0) > MOST:
        return "parameters: more than can be counted"
    evaluations = (counted.evaluations if counted else None) or ()
    if not _is_between([one.step * spec.tokens_per_step for one in evaluations], 0, MOST):
        return "observations.evaluations: behind more tokens than can be counted"
    if any(isinstance(size, int | float) and abs(size) > MOST_SIZE for size in spec.model.shape.values()):
        return "spec.model.shape: a size that no model has"
    return None


def _check_outcome(record: RunRecord) -> str | None:
    """What ended well has something to show: a measured run its window, a rehearsal the time that a step computes, or
    where it computed nothing its memory."""
    if record.outcome.kind != "ok":
        return None
    observed = record.observations
    if observed is None:
        return "observations: none of a run that ended well"
    if record.evidence == "rehearsed":
        if record.circumstance.shapes_only:
            return None if observed.memory else "observations.memory: none of a rehearsal that ended well"
        shown = observed.compute_s or observed.steps
        return None if shown else "observations.compute_s: none of a rehearsal that ended well"
    steps = observed.steps
    if steps is None or steps.cut >= len(steps.step_s) or steps.window_s <= 0:
        return "observations.steps: no window in a run that ended well"
    return None


def _check_observations(observed: Observations) -> str | None:
    if observed.steps and (rule := _check_steps(observed.steps)):
        return f"observations.steps.{rule}"
    if observed.tokens and not _is_between(tuple(observed.tokens.root.values()), 0, MOST):
        return "observations.tokens: not a number of tokens"
    if not _is_between(observed.compute_s, 0, MOST_S) or not _is_between(observed.outside_collectives_s, 0, MOST_S):
        return "observations: compute_s or outside_collectives_s: not seconds of a step"
    if not _is_between([idle for idle in observed.idle_s or () if idle is not None], 0, MOST_S):
        return "observations.idle_s: not seconds of a step"
    timed = [seconds for rank in observed.passes or () for one in rank for seconds in (one.begin_s, one.end_s)]
    if not _is_between(timed, 0, MOST_S):
        return "observations.passes: not seconds of a step"
    if not _is_between([energy for energy in observed.energy_j if energy is not None], -MOST, MOST):
        return "observations.energy_j: no energy of a run"
    return None


def _check_steps(steps: Steps) -> str | None:
    count = len(steps.step_s)
    if not _is_between(steps.step_s, LEAST_S, MOST_S):
        return "step_s: not seconds of a step"
    if not _is_between(steps.data_wait_s, 0, MOST_S) or len(steps.data_wait_s) != count:
        return "data_wait_s: not seconds of each step"
    if not 0 <= steps.cut <= count or not (steps.window_s == 0 or LEAST_S <= steps.window_s <= MOST_S):
        return "cut: no window among the steps"
    if len(steps.loss) != count or len(steps.gradient_norm) not in (0, count):
        return "loss: not one of each step"
    if not _is_between(steps.skipped, 0, count - 1):
        return "skipped: not steps of this run"
    return None


def _is_between(values: Sequence[float], low: float, high: float) -> bool:
    return not values or (low <= min(values) and max(values) <= high)


def _check_plain(record: RunRecord) -> str | None:
    """The rules for what has no types, of that which more than a reader's eye depends on."""
    spec, environment = record.spec, record.environment
    if environment and environment.git and not isinstance(environment.git.get("commit"), str | None):
        return "environment.git.commit: no text"
    for name, part in (("model.shape", spec.model.shape), ("engine", spec.engine.options), ("data", spec.data.options)):
        if not _is_finite(part):
            return f"spec.{name}: a number that is not finite"
    return None


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    return all(map(_is_finite, value)) if isinstance(value, list | tuple) else True
