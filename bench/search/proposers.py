"""What is tried next, from what came of the trials so far: pure, so that a search that was killed goes on as it would
have."""

import math
from collections.abc import Sequence

from bench.search.candidates import CandidatePool
from bench.search.costs import find_cost
from bench.search_section import SearchSection
from bench.sweep.policy import Proposal, TrialResult

PATIENCE = 20
"""A search by one of Optuna's samplers ends once so many trials in a row improve the best by less than `gain`. In 60
replays on published steps (docs/guides/search.md) a search by `gp` never needed as many for its next improvement."""


def is_spent(section: SearchSection, results: Sequence[TrialResult]) -> bool:
    """Whether a search has had all the trials or node-hours that it may have."""
    hours = sum(result.node_hours for result in results)
    return len(results) >= section.trials or (section.node_hours is not None and hours >= section.node_hours)


def is_settled(section: SearchSection, results: Sequence[TrialResult]) -> bool:
    """Whether the last trials with an answer improved the best by less than was asked for. Trainings with rungs are
    never settled: their losses compare with their like alone."""
    if section.rungs or section.sampler in ("grid", "random"):
        return False
    costs = [math.inf if (cost := find_cost(section, one)) is None else cost for one in results if one.outcome]
    return len(costs) > PATIENCE and min(costs[:-PATIENCE]) - min(costs) < section.gain


class ListProposer:
    """Candidates one after the other: a grid in its own order, or in a seeded-random one."""

    def __init__(self, pool: CandidatePool, *, at_random: bool) -> None:
        self._section = pool.section
        candidates = [candidate for candidate in pool.list_all() if candidate.may_fit]
        order = pool.shuffle(candidates) if at_random else range(len(candidates))
        self._candidates = [candidates[place] for place in order]

    def propose(self, results: Sequence[TrialResult]) -> Proposal | None:
        """Return the first candidate that was not tried; None at the end of them."""
        if is_spent(self._section, results):
            return None
        tried = {result.trial.point.config_id for result in results}
        left = (candidate for candidate in self._candidates if candidate.point.config_id not in tried)
        found = next(left, None)
        return Proposal(found.point, found.values) if found else None
