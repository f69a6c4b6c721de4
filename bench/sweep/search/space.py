"""Combinations of values in a search space, listed or drawn at random, and their points (configurations). Each point is
composed and predicted only once."""

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from bench.core.errors import UserError
from bench.core.machine import Machine
from bench.core.quantities import predict_quantity
from bench.core.spec import RunSpec
from bench.core.study import MOST_LISTED, Dimension, Pair, SearchSection
from bench.sweep.definition import SweepPoint
from bench.sweep.pruning import find_rank_memory_bytes, is_far_out_of_memory

Values = dict[str, Any]
"""One point of a search space: a value for each active dimension, by the dimension's name."""
_MOST_DRAWS = 20  # draws per requested combination of values: a draw may repeat an earlier one


class SearchSpace:
    """The dimensions of a search space, in order. A dimension may have a condition on the values of earlier dimensions;
    it is active if the condition holds."""

    def __init__(self, section: SearchSection, base: Mapping[str, Any] | None = None) -> None:
        """`section` defines the dimensions: the fields that the search varies. A dimension may have a condition: it is
        used only if another field has certain values. The other field is an earlier dimension, or a field in `base`,
        which holds the study's fields with fixed values."""
        self.dimensions, self._base = section.space, dict(base or {})

    def is_active(self, key: str, before: Mapping[str, Any]) -> bool:
        """Return whether the condition of a dimension holds. `before` has the values of earlier dimensions by their
        names."""
        fields = self._base | dict(list_pairs(before))
        return all(fields.get(name) in allowed for name, allowed in self.dimensions[key].when.items())

    def _iterate_from(self, before: Values, keys: list[str]) -> Iterator[Values]:
        """Yield all combinations of values of the dimensions `keys`. `before` has the values of earlier dimensions;
        they are a part of every combination. The last dimension varies fastest."""
        if not keys:
            yield before
            return
        key, rest = keys[0], keys[1:]
        if not self.is_active(key, before):
            yield from self._iterate_from(before, rest)
            return
        for value in self.dimensions[key].list_values() or ():
            yield from self._iterate_from({**before, key: value}, rest)

    def draw(self, generator: random.Random) -> Values:
        """Return random values for all active dimensions: uniform over a range or list, and log-uniform over a
        logarithmic range."""
        values: Values = {}
        for key, dimension in self.dimensions.items():
            if self.is_active(key, values):
                values[key] = _draw_value(dimension, generator)
        return values

    def list_all(self, most: int = MOST_LISTED) -> list[Values] | None:
        """Return all combinations of values, in the order of the dimensions. None if there are more than `most`."""
        if any(dimension.list_values() is None for dimension in self.dimensions.values()):
            return None
        found = list(itertools.islice(self._iterate_from({}, list(self.dimensions)), most + 1))
        return None if len(found) > most else found

    def list_candidates(self, seed: int, most: int = MOST_LISTED) -> list[Values]:
        """Return all combinations of values if there are at most `most`. Otherwise, return `most` random combinations,
        or fewer if too many draws repeat earlier ones."""
        listed = self.list_all(most)
        if listed is not None:
            return listed
        generator, drawn = random.Random(seed), dict[str, Values]()
        for _ in range(_MOST_DRAWS * most):
            values = self.draw(generator)
            drawn.setdefault(format_key(values), values)
            if len(drawn) == most:
                break
        return list(drawn.values())

    def compute_share(self, values: Mapping[str, Any]) -> float:
        """Return a number proportional to the probability that `draw` returns these values. Only defined for a space
        whose values can be listed."""
        return math.prod(self.dimensions[key].compute_share(value) for key, value in values.items())


def list_pairs(values: Mapping[str, Any]) -> list[Pair]:
    """Return the overrides for values of a search space. A value that is a mapping sets several fields and gives one
    override for each."""
    several = (value if isinstance(value, Mapping) else {key: value} for key, value in values.items())
    return [pair for fields in several for pair in fields.items()]


def format_key(values: Mapping[str, Any]) -> str:
    """Return a text that identifies a combination of values of a search space: equal combinations give equal texts."""
    return json.dumps(values, sort_keys=True)


def _draw_value(dimension: Dimension, generator: random.Random) -> Any:
    if dimension.count is not None and not dimension.log:
        return dimension.find_value(generator.randrange(dimension.count))
    assert dimension.from_ is not None and dimension.to is not None
    if not dimension.log:
        return generator.uniform(dimension.from_, dimension.to)
    if not dimension.whole:
        return math.exp(generator.uniform(math.log(dimension.from_), math.log(dimension.to)))
    # every whole number has a share of the range
    low, high = math.log(dimension.from_ - 0.5), math.log(dimension.to + 0.5)
    return min(max(round(math.exp(generator.uniform(low, high))), int(dimension.from_)), int(dimension.to))


BuildPoint = Callable[[Mapping[str, Any]], SweepPoint]
"""Function that returns the point with the given values. It raises UserError if a rule excludes the point or it cannot
run."""


class SearchCandidate(NamedTuple):
    """A point (configuration) of the search space that a search may try."""

    values: Values
    point: SweepPoint
    predicted: float | None  # value of the search's objective; None without a prediction, or if it does not fit
    may_fit: bool  # False if it surely exceeds the device's memory


class CandidatePool:
    """Candidates of a search, found by their values. Each candidate is composed and predicted when it is first
    needed."""

    def __init__(self, section: SearchSection, space: SearchSpace, build: BuildPoint, machine: Machine) -> None:
        self.section, self.space, self.machine = section, space, machine
        self._build = build
        self._known: dict[str, SearchCandidate | str] = {}

    def find(self, values: Mapping[str, Any]) -> SearchCandidate | None:
        """Return the candidate with these values; None if it cannot run."""
        key = format_key(values)
        if key not in self._known:
            try:
                self._known[key] = self._build_candidate(dict(values))
            except UserError as refused:
                self._known[key] = str(refused)
        found = self._known[key]
        return found if isinstance(found, SearchCandidate) else None

    def list_all(self) -> list[SearchCandidate]:
        """Return all candidates without duplicates. If the space is too large to list, return randomly drawn
        candidates. Raise UserError if no candidate can run."""
        everything = self.space.list_candidates(self.section.seed)
        found: dict[str, SearchCandidate] = {}
        for values in everything:
            if candidate := self.find(values):
                found.setdefault(candidate.point.config_id, candidate)
        if not found:
            why, count = Counter(self.explain_left_out()).most_common(1)[0]
            rule = f"none of its {len(everything):,} points can run; {count:,} of them are refused because of {why}"
            raise UserError("search.space", rule, "change the space, or the rules in exclude")
        return list(found.values())

    def shuffle(self, candidates: list[SearchCandidate]) -> list[SearchCandidate]:
        """Return candidates from `list_all` in a seeded random order. Repeatedly, one of the remaining candidates is
        drawn with a probability proportional to its share of the space (Efraimidis and Spirakis, 2006).

        If the space is too large to list, the candidates were drawn at random already, and they keep their order.
        """
        if self.space.list_all() is None:
            return candidates
        shares = [self.space.compute_share(candidate.values) for candidate in candidates]
        generator = random.Random(self.section.seed)
        if len(set(shares)) < 2:
            return generator.sample(candidates, len(candidates))
        keys = [generator.expovariate(share) for share in shares]
        return [candidates[at] for at in sorted(range(len(candidates)), key=keys.__getitem__)]

    def explain_left_out(self) -> list[str]:
        """Return the error messages of all combinations of values that were looked up so far and cannot run."""
        return [found for found in self._known.values() if isinstance(found, str)]

    def _build_candidate(self, values: Values) -> SearchCandidate:
        point = self._build(values)
        forecast, spec = point.forecast, RunSpec.model_validate(point.spec)
        room, step = (forecast.room, forecast.step) if forecast else (None, None)
        if room and room.fits(find_rank_memory_bytes(self.machine, point.devices_per_node)) == "does not fit":
            step = None  # as in `predict`; so the point is not among those that are predicted to be the best
        step_s, tensor_bytes = step.s if step else None, room.tensor_bytes if room else None
        predicted = predict_quantity(self.section.objective, spec, step_s, tensor_bytes)
        return SearchCandidate(values, point, predicted, not is_far_out_of_memory(point, self.machine))
