"""Result of a search: the best trial, the trials whose intervals overlap the best trial's interval, and the cost."""

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

from bench.core.formatting import format_number
from bench.core.study import SearchSection
from bench.sweep.policy import TrialResult
from bench.sweep.search.halving import (
    HalvingProposer,
    RungResult,
    count_trials_left,
    find_end,
    find_rungs,
    list_rung_tokens,
    select_furthest,
)
from bench.sweep.search.proposers import PATIENCE, ListProposer, explain_unmet, find_cost, is_settled, is_spent
from bench.sweep.search.space import CandidatePool


class SearchVerdict(NamedTuple):
    """State of a search: its best trial so far, counts of its trials and points, and whether and why it has ended."""

    section: SearchSection
    best: TrialResult | None  # None if no trial has a result within the constraints
    unmet: str  # the constraint that no result satisfies, as a message; empty if there is none
    equals: tuple[TrialResult, ...]  # trials whose intervals overlap the best trial's interval, best first
    outcomes: Counter[str]
    ended_early: int  # number of trials whose measurement ended early, because they could no longer be the best
    pending: int  # trials without an answer
    environments: int  # largest number of different environments among trials with equal devices per node
    node_hours: float
    candidates: int | None  # points of the space that may fit the device; None if the space is too large to list
    never_feasible: int  # points of the space that surely exceed the device's memory
    cannot_run: int  # points of the space that an error or a rule excludes
    is_settled: bool  # the search has ended because its last trials improved the best too little
    is_spent: bool  # the search has ended because its budget is used up
    reached: dict[int, int]  # number of trainings with a result, by the tokens of their end; empty without rungs
    whole_tokens: int | None  # length of a complete training; None without rungs
    is_exhausted: bool  # in a search with rungs: no training is left to start or to resume

    def __repr__(self) -> str:
        outcomes = ", ".join(f"{number} {kind}" for kind, number in self.outcomes.most_common())
        best = self.best.trial.point.line if self.best else self.unmet or "none"
        return f"<SearchVerdict: best {self.section.objective}: {best}; {outcomes or 'no trial'}>"

    @property
    def is_over(self) -> bool:
        """Return True if the search has ended: no trial is pending, and either the budget is used up or no useful trial
        is left."""
        return not self.pending and (self.is_spent or self._is_finished)

    @property
    def none_ended(self) -> bool:
        """Return True for a search with rungs (numbers of tokens after which trainings stop) in which no training is
        complete. The best trial of such a search was ranked before the learning-rate schedule had ended."""
        return self.whole_tokens is not None and self.whole_tokens not in self.reached

    @property
    def _is_finished(self) -> bool:
        if self.section.rungs:
            return self.is_exhausted
        return self.candidates == sum(self.outcomes.values()) or self.is_settled


def conclude(pool: CandidatePool, results: Sequence[TrialResult]) -> SearchVerdict:
    """Return the state of a search, computed from the results of its trials."""
    section = pool.section
    ended = _rank(section, results)
    best = ended[0] if ended else None
    listed = pool.list_all() if pool.space.list_all() is not None else None
    trained = [result for result in results if section.rungs]
    reached = Counter(find_end(one.trial.point.spec) for one in trained if find_cost(section, one) is not None)
    return SearchVerdict(
        section=section,
        best=best,
        unmet=explain_unmet(section, results),
        equals=tuple(result for result in ended[1:] if best and _overlap(section, best, result)),
        outcomes=Counter(result.outcome for result in results if result.outcome),
        ended_early=sum(result.quantities is not None and result.quantities.ended_early for result in results),
        environments=_count_environments(results),
        pending=sum(result.outcome is None for result in results),
        node_hours=sum(result.node_hours for result in results),
        candidates=sum(candidate.may_fit for candidate in listed) if listed is not None else None,
        never_feasible=sum(not candidate.may_fit for candidate in listed or ()),
        cannot_run=len(pool.explain_left_out()),
        is_settled=is_settled(section, results),
        is_spent=is_spent(section, results),
        reached=dict(sorted(reached.items())),
        whole_tokens=max((int(one.trial.point.spec["learning"]["tokens"]) for one in trained), default=None),
        is_exhausted=section.rungs is not None
        and HalvingProposer(pool, ListProposer(pool, at_random=False)).propose(results) is None,
    )


def describe_best(section: SearchSection, results: Sequence[TrialResult]) -> str:
    """Return a text with the best trial so far, by the objective and the constraints of the search. Empty if no trial
    has a result within the constraints."""
    best = next(iter(_rank(section, results)), None)
    if best is None or best.quantities is None:
        return ""
    value = best.quantities.get(section.objective)
    assert value is not None
    return f"best so far: trial {best.trial.number + 1}, {section.objective} {format_number(value, 4)}"


def _rank(section: SearchSection, results: Sequence[TrialResult]) -> list[TrialResult]:
    """Return the trials with a result within the constraints, the best first. Of each training, only the trial that
    went furthest is included."""
    known = [(cost, one) for one in select_furthest(section, results) if (cost := find_cost(section, one)) is not None]
    return [one for _, one in sorted(known, key=lambda pair: pair[0])]


class SearchOutlook(NamedTuple):
    """Trials and time that a search still needs."""

    trials: int  # expected number of trials of the whole search
    bound: Literal["exactly", "about", "at most"]  # meaning of `trials`
    left: int  # number of these trials without an answer, the current trial included
    run_s: float | None  # expected time of the current trial; None if no trial has a result
    left_s: float | None  # expected time of all trials without an answer; None if no trial has a result


def foresee(pool: CandidatePool, results: Sequence[TrialResult], current: TrialResult) -> SearchOutlook:
    """Return the number of trials and the time that a search still needs. `results` are the results of the trials so
    far, and `current` is the trial that starts now."""
    section, is_listed = pool.section, pool.space.list_all() is not None
    fit = sum(candidate.may_fit for candidate in pool.list_all()) if is_listed else section.trials
    pending = sum(result.outcome is None for result in results)
    if section.rungs:
        return _foresee_rungs(section, results, current, fit)
    trials = max(min(section.trials, fit), len(results))
    left = trials - len(results) + pending
    known = [_get_seconds(one) for one in results if one.outcome and one.node_hours]
    each_s = statistics.median(known) if known else None
    settles = section.trials > PATIENCE and section.sampler not in ("grid", "random")
    bound: Literal["exactly", "at most"] = "at most" if settles or section.node_hours is not None else "exactly"
    return SearchOutlook(trials, bound, left, each_s, None if each_s is None else left * each_s)


def _foresee_rungs(
    section: SearchSection, results: Sequence[TrialResult], current: TrialResult, trainings: int
) -> SearchOutlook:
    """Return the number of trials and the time that a search with rungs still needs. A rung is a number of tokens after
    which trainings stop. Both numbers are approximate, because the order of the results at a rung affects how many
    trainings go on."""
    assert section.rungs
    spec, reached = current.trial.point.spec, find_rungs(section, results)
    tokens = list_rung_tokens(section.rungs, spec["learning"]["tokens"])
    new = count_trials_left(section, reached, len(tokens) - 1, trainings)
    left = new + Counter(one.rung for one in reached if one.result.outcome is None)
    trials = len(results) + new.total()
    if not (each_s := _list_rung_seconds(reached, tokens)):
        return SearchOutlook(trials, "about", left.total(), None, None)
    left_s = sum(each_s[rung] * number for rung, number in left.items())
    return SearchOutlook(trials, "about", left.total(), each_s[tokens.index(find_end(spec))], left_s)


def _list_rung_seconds(reached: Sequence[RungResult], tokens: Sequence[int]) -> list[float]:
    """Return the expected seconds of a trial that ends at each rung, by the index of the rung. A rung is a number of
    tokens after which trainings stop; a trial begins at one rung and ends at the next.

    For a rung at which trials have ended, the result is the median of their seconds. For any other rung, the median at
    the highest rung with a result is scaled by the ratio of the tokens in a trial at the two rungs. Empty if no rung
    has a result.
    """
    known: dict[int, list[float]] = {}
    for rung, result in ((one.rung, one.result) for one in reached):
        if result.outcome and result.node_hours:
            known.setdefault(rung, []).append(_get_seconds(result))
    if not known:
        return []
    spans = [end - begin for begin, end in itertools.pairwise([0, *tokens])]
    last = max(known)
    return [
        statistics.median(known[rung]) if rung in known else statistics.median(known[last]) * span / spans[last]
        for rung, span in enumerate(spans)
    ]


def _get_seconds(result: TrialResult) -> float:
    return 3600 * result.node_hours / result.trial.point.nodes


def _count_environments(results: Sequence[TrialResult]) -> int:
    """Return the largest number of different environments among trials with the same number of devices per node.

    Trials with different numbers of devices per node are counted separately. Even on one machine, the number of devices
    per node changes the number of threads per rank. The number of threads is a part of the environment.
    """
    found: dict[int, set[str]] = {}
    for result in results:
        if result.environment_id:
            found.setdefault(result.trial.point.devices_per_node, set()).add(result.environment_id)
    return max(map(len, found.values()), default=0)


def find_interval(section: SearchSection, result: TrialResult) -> tuple[float, float]:
    """Return the low and high end of the uncertainty interval of a trial's objective, estimated from this trial's run
    alone. If there is no interval, return the measured value as both ends."""
    assert result.quantities
    value = result.quantities.get(section.objective)
    assert value is not None
    return result.quantities.interval(section.objective) or (value, value)


def _overlap(section: SearchSection, one: TrialResult, other: TrialResult) -> bool:
    (low, high), (other_low, other_high) = find_interval(section, one), find_interval(section, other)
    return low <= other_high and other_low <= high
