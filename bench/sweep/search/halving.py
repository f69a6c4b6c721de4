"""Successive halving: every training stops early at first, and the best are resumed from their checkpoints.

Asynchronous (ASHA; Li et al., arXiv 1810.05934): a training is promoted as soon as it is among the best 1/`factor` of
its rung, so that no trial waits for a round to end. When no training is left to begin, the best of the highest rung
goes on until one training has reached its end. With several `brackets`, some trainings begin at a higher rung
(Hyperband; Li et al., arXiv 1603.06560), in favour of configurations that start slowly.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.core.study import RungSection, SearchSection
from bench.sweep.policy import Proposal, Proposer, TrialResult
from bench.sweep.search.proposers import find_cost, is_spent
from bench.sweep.search.space import CandidatePool, Values, format_key

STOP = "learning.stop_after"


class RungResult(NamedTuple):
    """A trial and the rung at which its training stops."""

    key: str  # identifies the training: a text made from its values of the space
    rung: int
    result: TrialResult


def list_rung_tokens(rungs: RungSection, tokens: int) -> list[int]:
    """Return the numbers of tokens after which a training may stop, in increasing order up to `tokens`."""
    found = [tokens]
    while (fewer := found[-1] // rungs.factor) >= rungs.least:
        found.append(fewer)
    return found[::-1]


def find_rungs(section: SearchSection, results: Sequence[TrialResult]) -> list[RungResult]:
    """Return the rung of each trial of a search with rungs."""
    assert section.rungs
    found = []
    for result in results:
        spec = result.trial.point.spec
        rung = list_rung_tokens(section.rungs, spec["learning"]["tokens"]).index(find_end(spec))
        found.append(RungResult(format_key(result.trial.values), rung, result))
    return found


def select_furthest(section: SearchSection, results: Sequence[TrialResult]) -> Sequence[TrialResult]:
    """Return the trials of the highest rung with a result: losses compare at equal tokens of a schedule alone.

    A search without rungs returns all trials.
    """
    if section.rungs is None:
        return results
    reached = find_rungs(section, results)
    highest = max((one.rung for one in reached if find_cost(section, one.result) is not None), default=0)
    return [one.result for one in reached if one.rung == highest]


class HalvingProposer:
    """Promotes a training among the best of its rung, and else begins a training proposed by the sampler."""

    def __init__(self, pool: CandidatePool, sampler: Proposer) -> None:
        assert pool.section.rungs
        self._pool, self._section, self._sampler, self._rungs = pool, pool.section, sampler, pool.section.rungs

    def propose(self, results: Sequence[TrialResult]) -> Proposal | None:
        """Return the next rung of a training, or a new training.

        None if the budget is spent, if answers are awaited, or if a training has ended and no other is left.
        """
        if is_spent(self._section, results):
            return None
        reached = find_rungs(self._section, results)
        return self._promote(reached) or self._begin(reached) or self._finish(reached)

    def _promote(self, reached: Sequence[RungResult]) -> Proposal | None:
        """Return the best training to promote that was not promoted yet, from the highest rung with one."""
        for rung in sorted({one.rung for one in reached}, reverse=True):
            ended = self._rank(reached, rung)
            if found := self._promote_first(reached, rung, ended, len(ended) // self._rungs.factor):
                return found
        return None

    def _finish(self, reached: Sequence[RungResult]) -> Proposal | None:
        """Return the next rung of the best training of the highest rung.

        In a space with few points, rungs may have too few trainings for a promotion: no training would reach its end.
        """
        if any(one.result.outcome is None for one in reached):
            return None
        for rung in sorted({one.rung for one in reached}, reverse=True):
            if ended := self._rank(reached, rung):  # a training of the last rung has ended
                return self._promote_first(reached, rung, ended, len(ended))
        return None

    def _rank(self, reached: Sequence[RungResult], rung: int) -> list[RungResult]:
        """Return the trainings with a result at a rung, the best first."""
        ended = [
            (cost, one.result.trial.number, one) for one in reached
            if one.rung == rung and (cost := find_cost(self._section, one.result)) is not None
        ]  # fmt: skip
        return [one for _, _, one in sorted(ended)]

    def _promote_first(
        self, reached: Sequence[RungResult], rung: int, ended: Sequence[RungResult], count: int
    ) -> Proposal | None:
        """Return the next rung of the first of the best `count` trainings that was not promoted yet."""
        above = {one.key for one in reached if one.rung == rung + 1}
        for place, one in enumerate(ended[:count], start=1):
            trial = one.result.trial
            if one.key not in above and (made := self._build_proposal(trial.values, rung + 1)):
                why = f"number {place} of {len(ended)} at {find_end(trial.point.spec):,} tokens"
                point = made.point.model_copy(update={"goes_on_from": trial.point.config_id})
                return made._replace(point=point, why=why)
        return None

    def _begin(self, reached: Sequence[RungResult]) -> Proposal | None:
        """Return a training proposed by the sampler, at the first rung of the bracket chosen by `choose_bracket`."""
        by_training = dict[str, list[RungResult]]()
        for one in reached:
            by_training.setdefault(one.key, []).append(one)
        whole: list[TrialResult] = []
        for first, *others in by_training.values():
            if candidate := self._pool.find(first.result.trial.values):  # the sampler gets complete trainings
                furthest = max([first, *others], key=lambda one: one.rung)
                trial = first.result.trial.model_copy(update={"point": candidate.point, "number": len(whole)})
                whole.append(furthest.result._replace(trial=trial))
        new = self._sampler.propose(whole)
        if new is None:
            return None
        last = len(self._list_tokens(new.point.spec)) - 1
        begun = Counter(min(one.rung for one in several) for several in by_training.values())
        made = self._build_proposal(new.values, choose_bracket(begun, self._rungs, last))
        return made._replace(why=new.why, sampler_state=new.sampler_state) if made else None

    def _build_proposal(self, values: Values, rung: int) -> Proposal | None:
        """Return a training that stops at a rung; None beyond the last rung."""
        whole = self._pool.find(values)
        tokens = self._list_tokens(whole.point.spec) if whole else []
        if rung >= len(tokens):
            return None
        found = whole if rung == len(tokens) - 1 else self._pool.find({**values, STOP: tokens[rung]})
        return Proposal(found.point, dict(values)) if found else None

    def _list_tokens(self, spec: Mapping[str, Any]) -> list[int]:
        return list_rung_tokens(self._rungs, spec["learning"]["tokens"])


def choose_bracket(begun: Mapping[int, int], rungs: RungSection, last: int) -> int:
    """Return the rung at which the next training begins: the one with the fewest trainings in `begun` for its share.

    Bracket b begins at rung b. All brackets cost about the same: bracket b has a number of trainings in proportion to
    (rungs + 1) / (rungs − b + 1) × factor^(rungs − b) (Hyperband, algorithm 1).
    """
    shares = {
        rung: rungs.factor ** (last - rung) / (last - rung + 1) for rung in range(min(rungs.brackets, last + 1))
    }  # fmt: skip
    return min(shares, key=lambda rung: (begun.get(rung, 0) / shares[rung], rung))


def find_end(spec: Mapping[str, Any]) -> int:
    """Return the number of tokens after which a run with this plain spec ends."""
    learning = spec["learning"]
    return int(learning["stop_after"] or learning["tokens"])
