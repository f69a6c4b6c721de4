"""Propose the next trial of a search from the results so far.

There are no side effects: an interrupted search continues with the same proposals as without the interruption.
"""

import math
import statistics
from collections.abc import Iterator, Sequence

from bench.core.errors import UserError
from bench.core.formatting import format_count, format_number
from bench.core.quantities import OBJECTIVES, compute_work
from bench.core.spec import RunSpec
from bench.core.study import SearchSection
from bench.sweep.definition import SweepPoint
from bench.sweep.policy import Proposal, Proposer, TrialResult
from bench.sweep.search.space import CandidatePool, SearchCandidate, Values

_LEAST_SPREAD = 0.01
"""Lower bound of the estimated standard deviation of log costs between points. It is used if noise alone explains all
measured differences."""


def compute_cost(objective: str, value: float | None) -> float | None:
    """Return the cost of an objective's value, for which lower is always better. It is the logarithm of the value,
    negated if large values of the objective are better. None if the value is unknown or not positive."""
    if value is None or value <= 0:
        return None
    return math.log(value) if OBJECTIVES[objective] == "least" else -math.log(value)


def find_cost(section: SearchSection, result: TrialResult) -> float | None:
    """Return the log cost of a trial (lower is better). None if the trial failed, violates a constraint, or has no
    result yet."""
    if result.quantities is None or not keeps_constraints(section, result):
        return None
    return compute_cost(section.objective, result.quantities.get(section.objective))


def compute_told_costs(section: SearchSection, results: Sequence[TrialResult]) -> list[float | None]:
    """Return the log costs of trials for a sampler that treats all trials as equally noisy.

    The cost of a noisy trial is moved towards the mean of all trials (Efron and Morris, 1975). Its distance from the
    mean is multiplied by v / (v + n), where v is the variance between points and n the noise variance of the trial.
    """
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
    """Return True if a trial ended `ok` and every constrained quantity was measured and is within its bounds."""
    measured = result.quantities
    return measured is not None and all(bound.holds(measured.get(name)) for name, bound in section.constraints.items())


def explain_unmet(section: SearchSection, results: Sequence[TrialResult]) -> str:
    """Return a message about a constraint that every measured trial violates. The message has the measured value that
    is closest to the bound of this constraint. If trials violate different constraints, the message names all
    constraints.

    Empty if a trial satisfies all constraints, or if no trial has a result.
    """
    measured = [result.quantities for result in results if result.quantities]
    if not measured or any(keeps_constraints(section, result) for result in results):
        return ""
    remedy = "relax it, or change the space"
    for name, bound in section.constraints.items():
        if any(bound.holds(one.get(name)) for one in measured):
            continue
        known = [value for one in measured if (value := one.get(name)) is not None]
        nearest = "its value is unknown"
        if known:
            nearest = f"the nearest value is {format_number(min(known, key=bound.compute_distance), 4)}"
        rule = f"must be {bound}, but none of the {format_count(len(measured), 'trial')} with outcome ok is; {nearest}"
        return str(UserError(f"search.constraints.{name}", rule, remedy))
    names = ", ".join(section.constraints)
    rule = f"none of the {format_count(len(measured), 'trial')} with outcome ok fulfils all of them"
    return str(UserError(f"search.constraints: {names}", rule, "relax one, or change the space"))


PATIENCE = 20
"""A search by one of Optuna's samplers ends if this many trials in a row together improve the best result too little:
by less than the search's setting `gain`.

For comparison, searches with the sampler `gp` were simulated on published step times. The median search found the best
point of the space after 12 trials with rough predictions, and after 16 trials without predictions. It was not measured
how many of these searches the rule would have ended before that.
"""


def is_spent(section: SearchSection, results: Sequence[TrialResult]) -> bool:
    """Return whether a search has used up its number of trials or its node-hours."""
    hours = sum(result.node_hours for result in results)
    return len(results) >= section.trials or (section.node_hours is not None and hours >= section.node_hours)


def is_settled(section: SearchSection, results: Sequence[TrialResult]) -> bool:
    """Return whether the last `PATIENCE` trials together improved the best result by less than the search's setting
    `gain`.

    The result is always False for the samplers `grid` and `random`. It is also False for a search with rungs (numbers
    of tokens after which trainings stop), because losses can be compared only at equal numbers of tokens.
    """
    if section.rungs or section.sampler in ("grid", "random"):
        return False
    answered = [one for one in results if one.outcome]
    costs = [math.inf if cost is None else cost for cost in compute_told_costs(section, answered)]
    return len(costs) > PATIENCE and min(costs[:-PATIENCE]) - min(costs) < section.gain


class ListProposer:
    """Proposes the candidates of a pool one after the other, in grid order or in a seeded random order."""

    def __init__(self, pool: CandidatePool, *, at_random: bool) -> None:
        self._section, self._pool = pool.section, pool
        self._drawn: list[Values] = []
        self._listed: list[SearchCandidate] = []
        if at_random and pool.space.list_all() is None:
            self._drawn = pool.space.list_candidates(pool.section.seed)
        else:
            self._listed = pool.shuffle(pool.list_all()) if at_random else pool.list_all()

    def _list(self) -> Iterator[SearchCandidate]:
        """Yield all candidates that may fit in memory. Randomly drawn candidates are composed one by one, because
        composing all of them takes minutes."""
        found = map(self._pool.find, self._drawn) if self._drawn else self._listed
        return (candidate for candidate in found if candidate and candidate.may_fit)

    def propose(self, results: Sequence[TrialResult]) -> Proposal | None:
        """Return the first candidate that was not tried yet. None if all were tried or the budget is used up."""
        if is_spent(self._section, results):
            return None
        tried = {result.trial.point.config_id for result in results}
        left = (candidate for candidate in self._list() if candidate.point.config_id not in tried)
        found = next(left, None)
        return Proposal(found.point, found.values) if found else None


MARGIN = 0.1
"""A trial ends early only if its steps take longer than those of the best trial by more than this share.

The margin is needed because two runs of one configuration differ by some percent more than the uncertainty interval of
either run shows.
"""


class EarlyEnd:
    """Adds a step limit to the proposals of another proposer. The measurement of a trial ends early if its steps surely
    take longer than this limit."""

    def __init__(self, proposer: Proposer, section: SearchSection) -> None:
        self._proposer, self._section = proposer, section

    def propose(self, results: Sequence[TrialResult]) -> Proposal | None:
        """Return the next proposal of the wrapped proposer, with a limit in seconds per step added. If the steps of the
        proposed trial surely take longer than this limit, its measurement ends early."""
        proposal = self._proposer.propose(results)
        if proposal is None:
            return None
        limit_s = compute_step_limit_s(self._section, proposal.point, results)
        return proposal._replace(point=proposal.point.model_copy(update={"step_limit_s": limit_s}))


def compute_step_limit_s(section: SearchSection, point: SweepPoint, results: Sequence[TrialResult]) -> float | None:
    """Return the seconds per step above which a point (configuration) cannot become the best of a search. None if no
    trial has a result, or if the objective is not a function of the step time.

    Each measured trial has an uncertainty interval of the objective. For the worse end of each interval, compute the
    step time with which `point` would reach this value of the objective. The limit is the smallest of these step times,
    multiplied by 1 + `MARGIN`.
    """
    ended = [result.quantities for result in results if find_cost(section, result) is not None and result.quantities]
    spec = RunSpec.model_validate(point.spec)
    tokens = float(spec.global_batch * spec.tokens_per_sample)
    work = compute_work(section.objective, spec.global_batch, tokens, spec.nodes)
    if not ended or not work:
        return None
    limits_s = []
    for one in ended:
        value, interval = one.get(section.objective), one.interval(section.objective)
        if interval:
            value = interval[0] if OBJECTIVES[section.objective] == "most" else interval[1]
        assert value
        limits_s.append(value if section.objective == "step_s" else work / value)
    return min(limits_s) * (1 + MARGIN)
