"""Trials that end as soon as their own steps show that they cannot win."""

from collections.abc import Sequence

from bench.quantities import OBJECTIVES, compute_work
from bench.search.costs import find_cost
from bench.search_section import SearchSection
from bench.spec import RunSpec
from bench.sweep.definition import SweepPoint
from bench.sweep.policy import Proposal, Proposer, TrialResult

MARGIN = 0.1
"""By so much more than the best may a step take before a trial is ended: two runs of the same differ by some percent
more than the steps of either show."""


class EarlyEnd:
    """A proposer whose trials end their windows once a step surely takes longer than that of a winner could."""

    def __init__(self, proposer: Proposer, section: SearchSection) -> None:
        self._proposer, self._section = proposer, section

    def propose(self, results: Sequence[TrialResult]) -> Proposal | None:
        """Return what the proposer asks for, with the longest step that is worth its whole window."""
        proposal = self._proposer.propose(results)
        if proposal is None:
            return None
        limit_s = compute_step_limit_s(self._section, proposal.point, results)
        return proposal._replace(point=proposal.point.model_copy(update={"step_limit_s": limit_s}))


def compute_step_limit_s(section: SearchSection, point: SweepPoint, results: Sequence[TrialResult]) -> float | None:
    """Return the seconds of a step above which a point cannot be the best: a trial surely needs less for the same work,
    by the end of its interval. None while there is none, or where what is sought does not follow from the time of a
    step."""
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
