"""What is tried next, from what came of the trials so far: pure, so that a search that was killed goes on as it would
have."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from bench.search.candidates import CandidatePool, SearchCandidate
from bench.search.costs import compute_cost, find_cost
from bench.search.surrogate import Array, Belief, Surrogate, compute_expected_gains
from bench.search_section import SearchSection
from bench.sweep.policy import Proposal, TrialResult

_HARDLY = 0.02
"""Probability that a candidate runs that needs as much memory as one that ran out of it."""


def is_spent(section: SearchSection, results: Sequence[TrialResult]) -> bool:
    """Whether a search has had all the trials or node-hours that it may have."""
    hours = sum(result.node_hours for result in results)
    return len(results) >= section.trials or (section.node_hours is not None and hours >= section.node_hours)


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


class PriorProposer:
    """The predicted best of each technique first; then whatever is expected to gain most by all that was measured."""

    def __init__(self, pool: CandidatePool) -> None:
        self._section = pool.section
        self.candidates = [candidate for candidate in pool.list_all() if candidate.may_fit]
        objective = self._section.objective
        costs = [compute_cost(objective, candidate.predicted) for candidate in self.candidates]
        by_ratio = {key for key, dimension in pool.space.dimensions.items() if dimension.log}
        self._surrogate = Surrogate([candidate.values for candidate in self.candidates], costs, by_ratio)
        self._index = {candidate.point.config_id: number for number, candidate in enumerate(self.candidates)}
        self._techniques = [candidate.point.spec["engine"]["name"] for candidate in self.candidates]
        self._needs = np.array([candidate.needs_bytes or np.nan for candidate in self.candidates])
        self._order = pool.shuffle(self.candidates)

    def propose(self, results: Sequence[TrialResult]) -> Proposal | None:
        """Return the next trial; None where no candidate is expected to gain as much as was asked for."""
        if is_spent(self._section, results) or len(results) >= len(self.candidates):
            return None
        chances = self.compute_chances(results)
        if (first := self._find_first_of_technique(results, chances)) is not None:
            return self._build_proposal(first, "predicted best of its technique")
        gains = self.compute_gains(results)
        if gains is None:  # nothing has run yet: by prediction
            order = np.where(chances > 0, self._surrogate.predicted - np.log(np.maximum(chances, _HARDLY)), np.inf)
            return self._build_proposal(int(np.argmin(order)), "predicted best of what is left")
        at = int(np.argmax(gains))
        if gains[at] < self._section.gain:
            return None
        return self._build_proposal(at, f"expected gain {100 * gains[at]:.2g} %")

    def compute_gains(self, results: Sequence[TrialResult]) -> Array | None:
        """Return the gain that each candidate is expected to bring, relative; None before anything has run."""
        tried, costs, noises = self._list_costs(results)
        if not tried:
            return None
        belief = self._surrogate.believe(tried, costs, noises)
        return compute_expected_gains(belief, float(belief.mean[tried].min())) * self.compute_chances(results)

    def find_best_cost(self, results: Sequence[TrialResult]) -> float | None:
        """Return the cost of the best trial, its luck taken out; None before anything has run."""
        tried, _, _ = self._list_costs(results)
        return float(self.believe(results).mean[tried].min()) if tried else None

    def draw_costs(
        self, results: Sequence[TrialResult], of: NDArray[np.int64], count: int, generator: np.random.Generator
    ) -> Array:
        """Draw the costs of some candidates together, `count` times, by all that was measured."""
        return self._surrogate.draw(*self._list_costs(results), of, count, generator)

    def believe(self, results: Sequence[TrialResult]) -> Belief:
        """Return what is believed of all candidates' costs."""
        return self._surrogate.believe(*self._list_costs(results))

    def compute_chances(self, results: Sequence[TrialResult]) -> Array:
        """Return the probability that each candidate runs; 0 of those that were asked for already.

        Of a technique whose trials fail, others will; and where one ran out of memory, what needs as much hardly fits.
        """
        techniques, chances = np.array(self._techniques), np.ones(len(self.candidates))
        ended = [(self._index[result.trial.point.config_id], result) for result in results if self._has(result)]
        for technique in dict.fromkeys(self._techniques):
            own = [(at, result) for at, result in ended if self._techniques[at] == technique and result.outcome]
            failed = [(at, result) for at, result in own if find_cost(self._section, result) is None]
            of_it = techniques == technique
            chances[of_it] *= (len(own) - len(failed) + 1) / (len(own) + 1)
            out = [self._needs[at] for at, result in failed if result.outcome in ("oom", "host_oom", "ok")]
            if out:
                chances[of_it & (self._needs >= min(out))] *= _HARDLY
        chances[[at for at, _ in ended]] = 0.0
        return chances

    def _list_costs(self, results: Sequence[TrialResult]) -> tuple[list[int], list[float], list[float]]:
        """Return the candidates that ended well, what they cost, and the noise of each that a sound run has not."""
        found = [
            (self._index[result.trial.point.config_id], cost, result.quantities.noise(self._section.objective))
            for result in results
            if self._has(result) and result.quantities and (cost := find_cost(self._section, result)) is not None
        ]
        return [at for at, _, _ in found], [cost for _, cost, _ in found], [noise for _, _, noise in found]

    def _has(self, result: TrialResult) -> bool:
        return result.trial.point.config_id in self._index

    def _find_first_of_technique(self, results: Sequence[TrialResult], chances: Array) -> int | None:
        """Return the predicted best of a technique of which nothing was tried, the best technique first."""
        met = {self._techniques[self._index[r.trial.point.config_id]] for r in results if self._has(r)}
        firsts = [at for at in self._order if self._techniques[at] not in met and chances[at] > 0]
        return min(firsts, key=lambda at: float(self._surrogate.predicted[at]), default=None)

    def _build_proposal(self, at: int, why: str) -> Proposal:
        candidate: SearchCandidate = self.candidates[at]
        return Proposal(candidate.point, candidate.values, why)
