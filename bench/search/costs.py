"""What a trial came to, as a number to be made small: the logarithm of its objective, turned round where the most is
sought. Differences of it are relative gains."""

import math

from bench.quantities import OBJECTIVES
from bench.search_section import SearchSection
from bench.sweep.policy import TrialResult


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


def keeps_constraints(section: SearchSection, result: TrialResult) -> bool:
    """Whether a trial ended well and every bounded quantity is known and within its bounds."""
    measured = result.quantities
    return measured is not None and all(bound.holds(measured.get(name)) for name, bound in section.constraints.items())
