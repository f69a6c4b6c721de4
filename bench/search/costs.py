"""What a trial came to, as a number to be made small: the logarithm of its objective, turned round where the most is
sought. Differences of it are relative gains."""

import math
import statistics
from collections.abc import Sequence

from bench.errors import UserError
from bench.formatting import format_count
from bench.quantities import OBJECTIVES
from bench.search_section import SearchSection
from bench.sweep.policy import TrialResult

_LEAST_SPREAD = 0.01
"""Of costs, as a deviation: points of a space differ by some percent, however little the noise leaves of it."""


def compute_cost(objective: str, value: float | None) -> float | None:
    """Return the cost of a value of an objective; None where it is unknown."""
    if value is None or value <= 0:
        return None
    return math.log(value) if OBJECTIVES[objective] == "least" else -math.log(value)


def find_cost(section: SearchSection, result: TrialResult) -> float | None:
    """Return what a trial cost; None for one that failed, that keeps not to the constraints, or that has no answer."""
    if result.quantities is None or not keeps_constraints(section, result):
        return None
    return compute_cost(section.objective, result.quantities.get(section.objective))


def compute_told_costs(section: SearchSection, results: Sequence[TrialResult]) -> list[float | None]:
    """Return the costs of trials as a sampler is told them that knows no noise of single trials: that of a run that was
    no sound measurement lies so much nearer to the mean of all as noise explains its distance (Efron and Morris,
    1975)."""
    costs = [find_cost(section, result) for result in results]
    noises = [result.quantities.noise(section.objective) if result.quantities else 0.0 for result in results]
    known = [(cost, noise**2) for cost, noise in zip(costs, noises, strict=True) if cost is not None]
    if not any(noise for _, noise in known):
        return costs
    spread = statistics.pvariance(cost for cost, _ in known) - statistics.mean(noise for _, noise in known)
    spread = max(spread, _LEAST_SPREAD**2)
    middle = statistics.fmean([cost for cost, _ in known], weights=[1 / (spread + noise) for _, noise in known])
    return [
        None if cost is None else middle + (cost - middle) * spread / (spread + noise**2)
        for cost, noise in zip(costs, noises, strict=True)
    ]


def keeps_constraints(section: SearchSection, result: TrialResult) -> bool:
    """Whether a trial ended well and every bounded quantity is known and within its bounds."""
    measured = result.quantities
    return measured is not None and all(bound.holds(measured.get(name)) for name, bound in section.constraints.items())


def explain_unmet(section: SearchSection, results: Sequence[TrialResult]) -> str:
    """Return which constraints no trial that ended well keeps to, and how near one came; empty where one keeps to all,
    and where none ended well."""
    measured = [result.quantities for result in results if result.quantities]
    if not measured or any(keeps_constraints(section, result) for result in results):
        return ""
    remedy = "loosen it, or change the space"
    for name, bound in section.constraints.items():
        if any(bound.holds(one.get(name)) for one in measured):
            continue
        known = [value for one in measured if (value := one.get(name)) is not None]
        nearest = f"the nearest has {min(known, key=bound.compute_distance):.4g}" if known else "it is known of none"
        rule = f"of {format_count(len(measured), 'trial')} that ended well none has {bound}; {nearest}"
        return str(UserError(f"search.constraints.{name}", rule, remedy))
    names = ", ".join(section.constraints)
    rule = f"of {format_count(len(measured), 'trial')} that ended well none keeps to all of them"
    return str(UserError(f"search.constraints: {names}", rule, "loosen one, or change the space"))
