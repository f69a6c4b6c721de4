"""Successive halving: every training first stops early, and the best trainings resume from their checkpoints.

The algorithm is asynchronous (ASHA; Li et al., arXiv 1810.05934). A rung is a number of tokens after which trainings
stop. A training is promoted (resumed up to the next rung) as soon as it is among the best 1/`factor` of its rung. So no
trial waits until all others have ended.

When no new training can begin, the best training of the highest rung continues until it is complete. With several
`brackets`, some trainings skip the lowest rungs and first stop at a higher one (Hyperband; Li et al., arXiv
1603.06560). This favours configurations that improve slowly at first.
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
    """Result of a trial, which is a section of a training. The trial stops at a rung, which is a number of tokens.
    `rung` is the index of this rung."""

    key: str  # identifies the training: a text made from its values of the space
    rung: int
    result: TrialResult


def list_rung_tokens(rungs: RungSection, tokens: int) -> list[int]:
    """Return the numbers of tokens after which a training may stop, in increasing order. The largest is `tokens`, its
    full length. Dividing a number by `factor` gives the next smaller number, which must be at least `least`. Example:
    1000 tokens with factor 4 and least 50 give [62, 250, 1000]."""
    found = [tokens]
    while (fewer := found[-1] // rungs.factor) >= rungs.least:
        found.append(fewer)
    return found[::-1]


def find_rungs(section: SearchSection, results: Sequence[TrialResult]) -> list[RungResult]:
    """Return each trial of a search with its training and rung. The search must have rungs (numbers of tokens after
    which trainings stop)."""
    assert section.rungs
    found = []
    for result in results:
        spec = result.trial.point.spec
        rung = list_rung_tokens(section.rungs, spec["learning"]["tokens"]).index(find_end(spec))
        found.append(RungResult(format_key(result.trial.values), rung, result))
    return found


def select_furthest(section: SearchSection, results: Sequence[TrialResult]) -> Sequence[TrialResult]:
    """Return the trials of the highest rung at which any trial has a result. A rung is a number of tokens after which
    trainings stop. Trials of other rungs are left out, because losses can be compared only after equal numbers of
    tokens.

    For a search without rungs, return all trials.
    """
    if section.rungs is None:
        return results
    reached = find_rungs(section, results)
    highest = max((one.rung for one in reached if find_cost(section, one.result) is not None), default=0)
    return [one.result for one in reached if one.rung == highest]


def count_trials_left(section: SearchSection, reached: Sequence[RungResult], last: int, trainings: int) -> Counter[int]:
    """Return the expected number of trials that a search still adds, by the index of the rung at which they stop. A
    rung is a number of tokens after which trainings stop. A trial is the section of a training up to its next rung.

    `reached` has the trials so far, `last` is the index of the last rung, and `trainings` is the number of trainings in
    the search space. It is assumed that one training in `factor` is resumed from each rung. The search's maximum number
    of trials limits the number of new trainings.
    """
    assert section.rungs
    made = Counter(one.rung for one in reached)
    by_training: dict[str, int] = {}
    for one in reached:
        by_training[one.key] = min(one.rung, by_training.get(one.key, one.rung))
    most = section.trials - len(reached)
    begun, left = Counter(by_training.values()), Counter[int]()
    for new in range(max(0, min(trainings - len(by_training), most)) + 1):
        if new:
            begun[choose_bracket(begun, section.rungs, last)] += 1
        ends = Counter[int]()
        for rung in range(last + 1):
            promoted = ends[rung - 1] // section.rungs.factor if rung else 0
            # The best training of a small space continues, even if its rung is too small to promote a training.
            ends[rung] = max(made[rung], begun[rung] + (promoted or int(rung > 0 and ends[rung - 1] > 0)))
        if (ends - made).total() > most:
            break
        left = ends - made
    return left


class HalvingProposer:
    """Proposes trials for successive halving. If a stopped training is among the best of its rung (the number of tokens
    at which it stopped), it is resumed up to the next rung. If there is no such training, the sampler proposes a new
    training."""

    def __init__(self, pool: CandidatePool, sampler: Proposer) -> None:
        assert pool.section.rungs
        self._pool, self._section, self._sampler, self._rungs = pool, pool.section, sampler, pool.section.rungs

    def propose(self, results: Sequence[TrialResult]) -> Proposal | None:
        """Return a proposal to resume a training up to its next rung, or to begin a new training. A rung is a number of
        tokens after which trainings stop.

        Return None if the budget is used up. If no training is good enough to be resumed and no new training can begin,
        there are two cases. If a trial is still running or a training is complete, return None. Otherwise, resume the
        best training.
        """
        if is_spent(self._section, results):
            return None
        reached = find_rungs(self._section, results)
        return self._promote(reached) or self._begin(reached) or self._finish(reached)

    def _promote(self, reached: Sequence[RungResult]) -> Proposal | None:
        """Return a proposal to resume a training up to the next rung (the next number of tokens at which trainings
        stop). The training is among the best 1/`factor` of its rung and was not resumed before. None if there is no
        such training.

        Trainings of higher rungs come first. Within a rung, better trainings come first.
        """
        for rung in sorted({one.rung for one in reached}, reverse=True):
            ended = self._rank(reached, rung)
            if found := self._promote_first(reached, rung, ended, len(ended) // self._rungs.factor):
                return found
        return None

    def _finish(self, reached: Sequence[RungResult]) -> Proposal | None:
        """Return a proposal to resume the best training of the highest rung up to the next rung. A rung is a number of
        tokens at which trainings stop. None while any trial has no outcome.

        `_promote` resumes only the best 1/`factor` of a rung's trainings. If fewer than `factor` trainings reach a
        rung, `_promote` resumes none of them. Without `_finish`, no training would then be completed.
        """
        if any(one.result.outcome is None for one in reached):
            return None
        for rung in sorted({one.rung for one in reached}, reverse=True):
            if ended := self._rank(reached, rung):  # a training of the last rung has ended
                return self._promote_first(reached, rung, ended, len(ended))
        return None

    def _rank(self, reached: Sequence[RungResult], rung: int) -> list[RungResult]:
        """Return the trainings that have a result at a rung (a number of tokens after which trainings stop), best
        first."""
        ended = [
            (cost, one.result.trial.number, one) for one in reached
            if one.rung == rung and (cost := find_cost(self._section, one.result)) is not None
        ]  # fmt: skip
        return [one for _, _, one in sorted(ended)]

    def _promote_first(
        self, reached: Sequence[RungResult], rung: int, ended: Sequence[RungResult], count: int
    ) -> Proposal | None:
        """Return a proposal to resume one training from `rung` up to the next rung (the next number of tokens at which
        trainings stop). It is the first training in `ended[:count]` that was not resumed before. None if all were
        resumed."""
        above = {one.key for one in reached if one.rung == rung + 1}
        for place, one in enumerate(ended[:count], start=1):
            trial = one.result.trial
            if one.key not in above and (made := self._build_proposal(trial.values, rung + 1)):
                why = f"rank {place} of {len(ended)} trainings at {find_end(trial.point.spec):,} tokens"
                point = made.point.model_copy(update={"goes_on_from": trial.point.config_id})
                return made._replace(point=point, why=why)
        return None

    def _begin(self, reached: Sequence[RungResult]) -> Proposal | None:
        """Return a proposal for a new training from the sampler; None if the sampler has none. `choose_bracket` selects
        the rung (number of tokens) at which the training first stops."""
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
        """Return a proposal to train with these values of the search space up to a rung, a number of tokens after which
        trainings stop. `rung` is the index of this rung. None if there is no such rung, or if the configuration with
        these values cannot run."""
        whole = self._pool.find(values)
        tokens = self._list_tokens(whole.point.spec) if whole else []
        if rung >= len(tokens):
            return None
        found = whole if rung == len(tokens) - 1 else self._pool.find({**values, STOP: tokens[rung]})
        return Proposal(found.point, dict(values)) if found else None

    def _list_tokens(self, spec: Mapping[str, Any]) -> list[int]:
        return list_rung_tokens(self._rungs, spec["learning"]["tokens"])


def choose_bracket(begun: Mapping[int, int], rungs: RungSection, last: int) -> int:
    """Return the index of the rung at which the next training first stops. A rung is a number of tokens after which
    trainings stop, and `last` is the index of the last rung. `begun` counts the trainings so far by the index of the
    rung at which they first stop.

    The trainings that first stop at rung b form bracket b. All brackets cost about the same if the number of trainings
    in bracket b is proportional to w(b) = factor^(last − b) / (last − b + 1) (Hyperband, algorithm 1). The next
    training goes to the bracket whose number of trainings, divided by w(b), is smallest.
    """
    shares = {
        rung: rungs.factor ** (last - rung) / (last - rung + 1) for rung in range(min(rungs.brackets, last + 1))
    }  # fmt: skip
    return min(shares, key=lambda rung: (begun.get(rung, 0) / shares[rung], rung))


def find_end(spec: Mapping[str, Any]) -> int:
    """Return the number of tokens after which a run ends. `spec` is its spec as JSON."""
    learning = spec["learning"]
    return int(learning["stop_after"] or learning["tokens"])
