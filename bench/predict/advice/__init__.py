"""Advice on which configuration to train with. It contains the best configuration, the best configuration for each
engine and for each node count, and the configurations that are as good as the best one within the prediction error."""

import math
from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple, TypeVar

from bench.core.formatting import format_interval
from bench.predict.advice.choices import (
    Choice,
    compute_extra_share,
    compute_price,
    compute_worst_price,
    is_surely_faster,
)
from bench.predict.goodput import FailureTerms, Goodput, predict_goodput
from bench.predict.scaling_laws import TrainingNeed
from bench.predict.step_time.compute import HOST_WORK

Kind = TypeVar("Kind")
Point = TypeVar("Point")

CLOSE = 0.05
"""Relative difference in time per token (or device-seconds per token) up to which two configurations count as equal: 5
%. Even the best predictions have errors of this size on average (results/predictions, step times)."""


Best = Literal["shortest", "cheapest"]
"""Objective of the advice: the fewest hours (`shortest`) or the fewest node-hours (`cheapest`)."""


class HoursInterval(NamedTuple):
    """Duration of a training in hours: the likely value, and the low and high end of its uncertainty interval."""

    likely: float
    low: float
    high: float


class AdviceQuestion(NamedTuple):
    """A user's question: length of the training, limits on hours and node-hours, and objective. A limit of None means
    no limit."""

    tokens: float | None = None  # tokens to train on, of all kinds and including padding
    deadline_h: float | None = None
    node_hours: float | None = None  # with a budget: at most the node-hours that it pays for
    best: Best | None = None  # None: chosen from the limits
    need: TrainingNeed | None = None  # tokens to reach a loss, which depend on the batch
    failures: FailureTerms | None = None  # None: failures are ignored
    budget: float | None = None  # most that the training may cost; only for texts, since `node_hours` has the limit

    @property
    def per_device(self) -> bool:
        """True if the objective is the lowest cost (device-seconds per token), False if it is the shortest time."""
        if self.best:
            return self.best == "cheapest"
        return self.deadline_h is not None or self.node_hours is None

    @property
    def has_length(self) -> bool:
        """True if the question states how long to train, by tokens or by a loss to reach."""
        return self.tokens is not None or self.need is not None

    @property
    def objective(self) -> str:
        """The objective and its limits, as text for the user."""
        best = "the fewest node-hours" if self.has_length else "the most tokens per second and device"
        return ", ".join([best if self.per_device else "the fastest", *self.limits])

    @property
    def limits(self) -> list[str]:
        """The limits that the user has set, each as text for the user."""
        return [
            *([f"done in {format_hours(self.deadline_h)}"] if self.deadline_h else []),
            *([f"a budget of {self.budget:,.6g}"] if self.budget else []),
            *([f"{self.node_hours:,.4g} node-hours at most"] if self.node_hours else []),
        ]

    def count_tokens(self, choice: Choice) -> float | None:
        """Return the number of tokens to train on with the batch size of `choice`; None if the length is unknown."""
        return self.need.compute_tokens(choice.time.tokens) if self.need else self.tokens

    def steps(self, choice: Choice) -> int | None:
        """Return the number of optimizer steps of the training with `choice`; None if the length is unknown."""
        tokens = self.count_tokens(choice)
        return math.ceil(tokens / choice.time.tokens) if tokens else None

    def predict_goodput(self, choice: Choice) -> Goodput | None:
        """Return the predicted goodput (share of the time that is not lost to failures) of a training job with
        `choice`; None if the advice ignores failures (`failures` is None)."""
        return predict_goodput(choice.spec.world_size, self.failures) if self.failures else None

    def hours(self, choice: Choice, step_s: float) -> float | None:
        """Return the hours of the whole training if a step takes `step_s` seconds, including time lost to expected
        failures. None if the length of the training (its tokens) is unknown."""
        goodput = self.predict_goodput(choice)
        return self._compute_hours(choice, step_s, goodput.share if goodput else 1.0)

    def predict_hours(self, choice: Choice) -> HoursInterval | None:
        """Return the hours of the whole training with an interval; None if the length of the training (its tokens) is
        unknown. The interval covers the error of the step time and the range of published failure rates."""
        goodput, (step_s, low_s, high_s, *_) = self.predict_goodput(choice), choice.estimate
        # the fast end of the interval has the lowest failure rate
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
        """Return the number of tokens that a training with `choice` must process, divided by the number that it needs
        with very small batches and without failures. Large batches need more tokens to reach a loss, and failures make
        a training repeat tokens."""
        goodput = self.predict_goodput(choice)
        share = goodput.share if goodput else 1.0
        tokens = self.need.compute_tokens(choice.time.tokens) / self.need.least_tokens if self.need else 1.0
        return tokens / share if share else math.inf

    def kept(self, choice: Choice) -> bool | None:
        """Return whether a training with `choice` keeps the limits on hours and node-hours. The predicted hours have an
        uncertainty interval. The result is True if even the high end keeps all limits, and False if the likely value
        misses a limit. The result is None if only the high end misses a limit. If the length of the training is
        unknown, no hours are predicted, and the result is True."""
        hours = self.predict_hours(choice)
        if hours is None:
            return True
        return all(self._kept(choice, hours.high)) or (None if all(self._kept(choice, hours.likely)) else False)

    def _kept(self, choice: Choice, hours: float) -> Iterable[bool]:
        yield self.deadline_h is None or hours <= self.deadline_h
        yield self.node_hours is None or hours * choice.spec.nodes <= self.node_hours

    def compute_costs(self, choice: Choice) -> tuple[float, float]:
        """Return the time (seconds) and the cost (device-seconds) per useful token. Time and cost include the work on
        tokens that are repeated after failures, and on the extra tokens that a large batch needs."""
        weight, step_s = self.compute_weight(choice), choice.estimate.step_s
        time_s, cost = (weight * compute_price(choice, step_s, per_device=each) for each in (False, True))
        return time_s, cost


class Advice(NamedTuple):
    """The advised configuration (the winner) and the configurations that were compared with it. The lists `engines`,
    `nodes` and `adapters` include the winner."""

    question: AdviceQuestion
    winner: Choice
    engines: list[Choice]  # best choice of each engine, on the winner's node count if possible; best first
    nodes: list[Choice]  # best choice of each node count
    perhaps: Choice | None  # a choice that is predicted to be better, but may not fit into memory or may miss a limit
    adapters: list[Choice]  # best choice of each adapter, full training included

    def is_distinct(self, rival: Choice) -> bool:
        """Return True if the winner is better than `rival` for every combination of prediction errors within the
        uncertainty intervals of these errors. Only the ends of the intervals are tested."""
        weight = self._compare_weights(rival)
        return is_surely_faster(self.winner, rival, per_device=self.question.per_device, weight=weight)

    def compute_extra_share(self, rival: Choice) -> float:
        """Return how much more time (or cost) per token `rival` takes than the winner, as a share of the winner's time
        (or cost). The share is negative if `rival` is predicted to be better."""
        more = compute_extra_share(self.winner, rival, per_device=self.question.per_device)
        weight = self._compare_weights(rival)
        return more if weight == 1 else (1 + more) * weight - 1

    def _compare_weights(self, rival: Choice) -> float:
        own, other = self.question.compute_weight(self.winner), self.question.compute_weight(rival)
        return 1.0 if own == other else other / own

    @property
    def rivals(self) -> list[Choice]:
        """Best choices, except the winner: the best for each engine, the best for each node count and the best for each
        adapter."""
        every = (*self.engines, *self.nodes, *self.adapters)
        found = {id(rival): rival for rival in every if rival is not self.winner}
        return list(found.values())

    @property
    def ties(self) -> list[Choice]:
        """Rivals that may be as good as the winner: the difference is within the prediction error, and both have the
        same doubt (`rate_doubt`) about memory and limits."""
        doubt = rate_doubt(self.winner, self.question)
        sound = [rival for rival in self.rivals if rate_doubt(rival, self.question) == doubt]
        return [rival for rival in sound if not self.is_distinct(rival)]

    def explain_order(self, rival: Choice) -> str:
        """Return the reason why `rival` is ranked after the winner although the prediction of `rival` is better. The
        text is empty if the prediction of `rival` is not better.

        The text is also empty if the doubt about `rival` (`rate_doubt`) is greater than the doubt about the winner. It
        is the doubt whether a choice fits into memory and keeps the limits. A greater doubt explains the order without
        a further reason.
        """
        share = self.compute_extra_share(rival)
        if share >= 0 or rate_doubt(rival, self.question) > rate_doubt(self.winner, self.question):
            return ""
        if rival.has_host_work and not self.winner.has_host_work and rival.estimate.evidence == "predicted":
            return f"less sure: {HOST_WORK}"
        if self.winner.estimate.evidence == "measured" != rival.estimate.evidence:
            return "less sure: the advised choice was measured"
        if share < -CLOSE:
            return "less sure: its slow end is later"
        if rival.spec.nodes > self.winner.spec.nodes:
            return f"equal within {100 * CLOSE:.0f} %: fewer nodes are advised"
        if rival.spec.adapter.quantization != self.winner.spec.adapter.quantization == "none":
            return f"equal within {100 * CLOSE:.0f} %: weights without quantisation are advised"
        if rival.spec.activation_checkpointing and not self.winner.spec.activation_checkpointing:
            return f"equal within {100 * CLOSE:.0f} %: no checkpointing is advised"
        return f"equal within {100 * CLOSE:.0f} %: the larger micro-batch is advised"


def rate_doubt(choice: Choice, question: AdviceQuestion) -> int:
    """Return the doubt about a choice as a rank from 0 to 3; `advise` prefers the lowest rank.

    0: the choice fits into memory and keeps the limits. 1: it fits, but may miss a limit. 2: it may not fit into
    memory. 3: it misses a limit even with its likely training time. The limits are the numbers of hours and node-hours
    in `question`.
    """
    kept = question.kept(choice)
    if kept is False:
        return 3
    return 2 if choice.candidate.fits is None else 0 if kept else 1


def find_front(points: Iterable[Point], take: Callable[[Point], tuple[float, float]]) -> list[Point]:
    """Return the Pareto front of `points`: the points for which no other point is both faster and cheaper. The fastest
    point comes first. Of several points with equal time and cost only the first is returned. `take` returns time and
    cost of a point."""
    front: list[Point] = []
    for point in sorted(points, key=take):
        if not front or take(point)[1] < take(front[-1])[1]:
            front.append(point)
    return front


class _RankedChoice(NamedTuple):
    choice: Choice
    order: tuple[int, float]  # `rate_doubt`, and time (or cost) per token at the slow end


def advise(question: AdviceQuestion, choices: list[Choice]) -> Advice:
    """Return the advice for a question. If every choice misses the limits, the winner misses them too. Raise ValueError
    if `choices` is empty.

    Choices are ordered by the doubt whether they fit into memory and keep the limits (`rate_doubt`). Choices with equal
    doubt are ordered by their time (or cost) per token, taken at the slow end of its uncertainty interval. So of two
    choices with equal predictions, the more certain choice comes first, such as a measured configuration. The interval
    excludes the error that all choices share.

    The winner is one of the choices with the least doubt. Of these, all choices within CLOSE (5 %) of the lowest time
    (or cost) count as equal. Among equal choices, the winner has the fewest nodes. Ties are broken by four further
    criteria, in this order: a measured step time, weights without quantisation, no activation checkpointing, and a
    larger micro-batch.
    """
    ranked = []
    for choice in choices:
        price = compute_worst_price(choice, per_device=question.per_device) * question.compute_weight(choice)
        ranked.append(_RankedChoice(choice, (rate_doubt(choice, question), price)))
    ranked.sort(key=lambda one: one.order)
    # lower doubt first: a choice that may not fit, or may miss a limit, is advised only if there is no other
    first = _find_best(ranked)
    winner, (doubt, takes_s) = first.choice, first.order
    more = [one for one in ranked if doubt < one.order[0] < 3 and one.order[1] * (1 + CLOSE) < takes_s]
    on_same_nodes = [one for one in ranked if one.choice.spec.nodes == winner.spec.nodes]
    engines = {
        name: one
        for some in (ranked, on_same_nodes)
        for name, one in _find_best_of_each(some, lambda choice: choice.spec.engine.name).items()
    } | {winner.spec.engine.name: first}
    nodes = _find_best_of_each(ranked, lambda choice: choice.spec.nodes) | {winner.spec.nodes: first}
    adapters = _find_best_of_each(ranked, lambda choice: choice.spec.adapter.name) | {winner.spec.adapter.name: first}
    return Advice(
        question,
        winner,
        [winner, *(one.choice for one in sorted(engines.values(), key=lambda one: one.order) if one is not first)],
        [nodes[count].choice for count in sorted(nodes)],
        _find_thriftiest(more).choice if more else None,
        [one.choice for one in sorted(adapters.values(), key=lambda one: one.order)],
    )


def _find_best(ranked: list[_RankedChoice]) -> _RankedChoice:
    """Return the best choice of a list that is sorted by the field `order`. Choices with more doubt than the first
    choice of the list are excluded. The doubt is whether a choice fits into memory and keeps the limits (`rate_doubt`).
    """
    return _find_thriftiest([one for one in ranked if one.order[0] == ranked[0].order[0]])


def _find_thriftiest(ranked: list[_RankedChoice]) -> _RankedChoice:
    """Return the best of the choices whose time (or cost) is within CLOSE (5 %) of the lowest. Fewer nodes are better.
    Ties are broken by four further criteria, in this order: a measured step time, weights without quantisation, no
    activation checkpointing, and a larger micro-batch."""
    least_s = min(one.order[1] for one in ranked)

    def order(one: _RankedChoice) -> tuple[int, bool, bool, bool, int]:
        spec, measured = one.choice.spec, one.choice.estimate.evidence == "measured"
        quantised = spec.adapter.quantization != "none"
        return spec.nodes, not measured, quantised, spec.activation_checkpointing, -spec.batch.micro

    return min((one for one in ranked if one.order[1] <= (1 + CLOSE) * least_s), key=order)


def _find_best_of_each(ranked: list[_RankedChoice], kind: Callable[[Choice], Kind]) -> dict[Kind, _RankedChoice]:
    groups: dict[Kind, list[_RankedChoice]] = {}
    for one in ranked:
        groups.setdefault(kind(one.choice), []).append(one)
    return {name: _find_best(group) for name, group in groups.items()}


_UNITS = ((60.0, 1.0, "s"), (3600.0, 60.0, "min"), (48 * 3600.0, 3600.0, "h"), (math.inf, 86_400.0, "days"))
"""Upper bound in seconds, length in seconds, and name of each unit of time. A duration is printed in the first unit
whose upper bound it does not reach. So durations of less than two days are printed in hours."""


def format_hours(hours: float) -> str:
    """Return a duration given in hours as text, in s, min, h or days."""
    seconds = 3600 * hours
    _, size, unit = next(one for one in _UNITS if seconds < one[0] or one[0] == math.inf)
    return f"{seconds / size:.3g} {unit}" if hours < 24_000 else f"{seconds / size:,.0f} {unit}"


def format_hours_interval(hours: float, low: float, high: float) -> str:
    """Return a duration in hours, and the ends `low` and `high` of its interval, as text. All three values are printed
    in the same unit and with three digits."""
    _, size, unit = next(one for one in _UNITS if 3600 * high < one[0] or one[0] == math.inf)
    return f"{format_interval(*(3600 * value / size for value in (hours, low, high)))} {unit}"
