"""From choices to advice: the best for what was asked, of each engine and node count too, and what cannot be told."""

import math
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, TypeVar

from bench.core.formatting import format_interval
from bench.predict.advice.choices import Choice, compute_extra_share, compute_worst_price, is_surely_faster
from bench.predict.goodput import FailureTerms, Goodput, predict_goodput
from bench.predict.scaling_laws import TrainingNeed

Kind = TypeVar("Kind")

CLOSE = 0.05
"""Share of the time per token (and device) below which one choice is as good as another. Where a prediction is at its
best its errors are that large on average (results/predictions, step times)."""


Best = Literal["shortest", "cheapest"]
"""In hours, and in node-hours."""


class HoursInterval(NamedTuple):
    """How long a training takes."""

    likely: float
    low: float
    high: float


class AdviceQuestion(NamedTuple):
    """What is asked for. None: not limited."""

    tokens: float | None = None  # to train on: of all kinds, padding included
    deadline_h: float | None = None
    node_hours: float | None = None
    best: Best | None = None  # None: as the limits have it
    need: TrainingNeed | None = None  # in place of tokens: as many as a loss takes, which depends on the batch
    failures: FailureTerms | None = None  # None: hours are those of a job that never fails

    @property
    def per_device(self) -> bool:
        """Whether the cheapest is the best; else the fastest is."""
        if self.best:
            return self.best == "cheapest"
        return self.deadline_h is not None or self.node_hours is None

    @property
    def has_length(self) -> bool:
        """Whether it is known how much is to be trained."""
        return self.tokens is not None or self.need is not None

    @property
    def objective(self) -> str:
        """What the best is, in words."""
        limits = [
            *([f"done in {format_hours(self.deadline_h)}"] if self.deadline_h else []),
            *([f"{self.node_hours:,.4g} node-hours at most"] if self.node_hours else []),
        ]
        best = "the fewest node-hours" if self.has_length else "the most tokens per second and device"
        return ", ".join([best if self.per_device else "the fastest", *limits])

    def count_tokens(self, choice: Choice) -> float | None:
        """Return the tokens to train on with the batch of `choice`."""
        return self.need.compute_tokens(choice.time.tokens) if self.need else self.tokens

    def steps(self, choice: Choice) -> int | None:
        """Return the optimizer steps that these make."""
        tokens = self.count_tokens(choice)
        return math.ceil(tokens / choice.time.tokens) if tokens else None

    def predict_goodput(self, choice: Choice) -> Goodput | None:
        """Return the goodput of a job with `choice`; None where it is unknown."""
        return predict_goodput(choice.spec.world_size, self.failures) if self.failures else None

    def hours(self, choice: Choice, step_s: float) -> float | None:
        """Return how long the training takes if a step takes `step_s`, with the failures to be expected."""
        goodput = self.predict_goodput(choice)
        return self._compute_hours(choice, step_s, goodput.share if goodput else 1.0)

    def predict_hours(self, choice: Choice) -> HoursInterval | None:
        """Return how long the training takes, with its interval; failures may be fewer or more than expected."""
        goodput, (step_s, low_s, high_s, *_) = self.predict_goodput(choice), choice.estimate
        shares = (goodput.share, goodput.high, goodput.low) if goodput else (1.0, 1.0, 1.0)
        found = [
            self._compute_hours(choice, seconds, share)
            for seconds, share in zip((step_s, low_s, high_s), shares, strict=True)
        ]
        known = [hours for hours in found if hours is not None]
        return HoursInterval(*known) if known else None

    def _compute_hours(self, choice: Choice, step_s: float, goodput: float) -> float | None:
        tokens = self.count_tokens(choice)
        if not tokens:
            return None
        return tokens / choice.time.tokens * step_s / 3600 / goodput if goodput else math.inf

    def compute_weight(self, choice: Choice) -> float:
        """Return what a token of `choice` counts for: more where batches are large, or where jobs often fail."""
        goodput = self.predict_goodput(choice)
        share = goodput.share if goodput else 1.0
        tokens = self.need.compute_tokens(choice.time.tokens) / self.need.least_tokens if self.need else 1.0
        return tokens / share if share else math.inf

    def kept(self, choice: Choice) -> bool | None:
        """Whether `choice` stays within the limits, also if it takes as long as may be; None: only if all goes well."""
        hours = self.predict_hours(choice)
        if hours is None:
            return True
        return all(self._kept(choice, hours.high)) or (None if all(self._kept(choice, hours.likely)) else False)

    def _kept(self, choice: Choice, hours: float) -> Iterable[bool]:
        yield self.deadline_h is None or hours <= self.deadline_h
        yield self.node_hours is None or hours * choice.spec.nodes <= self.node_hours


class Advice(NamedTuple):
    """The answer; both lists hold the winner, too."""

    question: AdviceQuestion
    winner: Choice
    engines: list[Choice]  # each at its best on the winner's nodes, or on others if it is nothing there; best first
    nodes: list[Choice]  # the best of each node count
    perhaps: Choice | None  # would be better, if it fits into memory and the limits

    def is_distinct(self, rival: Choice) -> bool:
        """Whether the winner is better than `rival` for sure."""
        weight = self._compare_weights(rival)
        return is_surely_faster(self.winner, rival, per_device=self.question.per_device, weight=weight)

    def compute_extra_share(self, rival: Choice) -> float:
        """Return how much more `rival` takes than the winner, as a share."""
        more = compute_extra_share(self.winner, rival, per_device=self.question.per_device)
        weight = self._compare_weights(rival)
        return more if weight == 1 else (1 + more) * weight - 1

    def _compare_weights(self, rival: Choice) -> float:
        own, other = self.question.compute_weight(self.winner), self.question.compute_weight(rival)
        return 1.0 if own == other else other / own

    @property
    def better_but_less_sure(self) -> Choice | None:
        """The tie that is predicted to be better than the winner by more than CLOSE, and is less sure."""
        by = {id(tie): self.compute_extra_share(tie) for tie in self.ties}
        best = min(self.ties, key=lambda tie: by[id(tie)], default=None)
        return best if best and by[id(best)] < -CLOSE else None

    @property
    def ties(self) -> list[Choice]:
        """Those of the best that may be as good as the winner."""
        rivals = {id(rival): rival for rival in (*self.engines, *self.nodes) if rival is not self.winner}
        sound = [
            rival
            for rival in rivals.values()
            if rate_doubt(rival, self.question) == rate_doubt(self.winner, self.question)
        ]
        return [rival for rival in sound if not self.is_distinct(rival)]


def rate_doubt(choice: Choice, question: AdviceQuestion) -> int:
    """Return 0 for what fits and stays within the limits for sure, 1 where the limits, 2 where the memory is in doubt,
    3 beyond the limits: a higher one is chosen only where there is no lower one."""
    kept = question.kept(choice)
    if kept is False:
        return 3
    return 2 if choice.candidate.fits is None else 0 if kept else 1


def advise(question: AdviceQuestion, choices: list[Choice]) -> Advice:
    """Return the advice; the winner may stand beyond the limits, where everything does. Raises ValueError without
    choices.

    Choices are put in the order of what they take if what is in doubt of each alone turns out badly: of two that cannot
    be told apart the surer one is advised, which is the lower stage or the one that was measured. Of those that are as
    good as the first by CLOSE, the one with the fewest nodes is, then one that was measured, then the largest
    micro-batch.
    """
    ranked = sorted((_rank_choice(choice, question) for choice in choices), key=lambda one: one.order)
    first = _find_best(ranked)
    winner, (doubt, takes_s) = first.choice, first.order
    more = [one for one in ranked if doubt < one.order[0] < 3 and one.order[1] * (1 + CLOSE) < takes_s]
    there = [one for one in ranked if one.choice.spec.nodes == winner.spec.nodes]
    engines = (
        _find_best_of_each(ranked, _get_engine_name)
        | _find_best_of_each(there, _get_engine_name)
        | {_get_engine_name(winner): first}
    )
    nodes = _find_best_of_each(ranked, _get_nodes) | {_get_nodes(winner): first}
    return Advice(
        question,
        winner,
        [winner, *(one.choice for one in sorted(engines.values(), key=lambda one: one.order) if one is not first)],
        [nodes[count].choice for count in sorted(nodes)],
        _find_thriftiest(more).choice if more else None,
    )


class _RankedChoice(NamedTuple):
    choice: Choice
    order: tuple[int, float]  # its standing, and what it takes per token (and device) at worst


def _rank_choice(choice: Choice, question: AdviceQuestion) -> _RankedChoice:
    price = compute_worst_price(choice, per_device=question.per_device) * question.compute_weight(choice)
    return _RankedChoice(choice, (rate_doubt(choice, question), price))


def _find_best(ranked: list[_RankedChoice]) -> _RankedChoice:
    """Return the one of `ranked`, which are in order, that is advised."""
    return _find_thriftiest([one for one in ranked if one.order[0] == ranked[0].order[0]])


def _find_thriftiest(ranked: list[_RankedChoice]) -> _RankedChoice:
    least_s = min(one.order[1] for one in ranked)
    return min((one for one in ranked if one.order[1] <= (1 + CLOSE) * least_s), key=_build_thrift_key)


def _build_thrift_key(one: _RankedChoice) -> tuple[int, bool, int]:
    spec = one.choice.spec
    return spec.nodes, one.choice.estimate.evidence != "measured", -spec.batch.micro


def _get_engine_name(choice: Choice) -> str:
    return choice.spec.engine.name


def _get_nodes(choice: Choice) -> int:
    return choice.spec.nodes


def _find_best_of_each(ranked: list[_RankedChoice], kind: Callable[[Choice], Kind]) -> dict[Kind, _RankedChoice]:
    groups: dict[Kind, list[_RankedChoice]] = {}
    for one in ranked:
        groups.setdefault(kind(one.choice), []).append(one)
    return {name: _find_best(group) for name, group in groups.items()}


def format_hours(hours: float) -> str:
    """Return hours as people say them."""
    if hours < 48:
        return f"{hours:.3g} h"
    return f"{hours / 24:.3g} days" if hours < 24_000 else f"{hours / 24:,.0f} days"


def format_hours_interval(hours: float, low: float, high: float) -> str:
    """Return hours with their interval in one unit, three digits each."""
    divisor, unit = (1, "h") if high < 48 else (24, "days")
    return f"{format_interval(hours / divisor, low / divisor, high / divisor)} {unit}"
