"""The points that a search may try: composed, checked and predicted once."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from bench.errors import UserError
from bench.machine import Machine
from bench.quantities import predict_quantity
from bench.search.space import SearchSpace, Values, format_key
from bench.search_section import SearchSection
from bench.spec import RunSpec
from bench.sweep.definition import SweepPoint
from bench.sweep.feasible import is_far_out_of_memory

BuildPoint = Callable[[Mapping[str, Any]], SweepPoint]
"""The point with these values; UserError for one that is left out or cannot run."""

_Item = TypeVar("_Item")


class SearchCandidate(NamedTuple):
    """A point that may be tried."""

    values: Values
    point: SweepPoint
    predicted: float | None  # its objective
    may_fit: bool  # into the device's memory; False: it surely does not
    needs_bytes: float | None  # at least, as predicted


class CandidatePool:
    """Candidates by their values; each is built when it is first looked at."""

    def __init__(self, section: SearchSection, space: SearchSpace, build: BuildPoint, machine: Machine) -> None:
        self.section, self.space, self.machine = section, space, machine
        self._build = build
        self._known: dict[str, SearchCandidate | str] = {}

    def find(self, values: Mapping[str, Any]) -> SearchCandidate | None:
        """Return the candidate with these values; None for what cannot run."""
        found = self._look_up(values)
        return found if isinstance(found, SearchCandidate) else None

    def list_all(self) -> list[SearchCandidate]:
        """Return every candidate, those of a large space drawn; each run once. UserError where none can run."""
        everything = self.space.list_candidates(self.section.seed)
        found: dict[str, SearchCandidate] = {}
        for values in everything:
            if candidate := self.find(values):
                found.setdefault(candidate.point.config_id, candidate)
        if not found:
            why, count = Counter(self.explain_left_out()).most_common(1)[0]
            rule = f"none of its {len(everything):,} points can run; of {count:,} the reason is: {why}"
            raise UserError("search.space", rule, "change the space, or the rules that leave points out")
        return list(found.values())

    def shuffle(self, candidates: Sequence[SearchCandidate]) -> list[int]:
        """Return the places of candidates from `list_all` in a seeded-random order. Those of a large space keep the
        order in which they were drawn."""
        places = range(len(candidates))
        if self.space.list_all() is None:
            return list(places)
        shares = [self.space.compute_share(candidate.values) for candidate in candidates]
        return _shuffle(places, self.section.seed, shares)

    def explain_left_out(self) -> list[str]:
        """Return why each of the values that were looked at cannot run."""
        return [found for found in self._known.values() if isinstance(found, str)]

    def _look_up(self, values: Mapping[str, Any]) -> SearchCandidate | str:
        key = format_key(values)
        if key not in self._known:
            try:
                self._known[key] = self._build_candidate(dict(values))
            except UserError as refused:
                self._known[key] = str(refused)
        return self._known[key]

    def _build_candidate(self, values: Values) -> SearchCandidate:
        point = self._build(values)
        forecast, spec = point.forecast, RunSpec.model_validate(point.spec)
        room, step = (forecast.room, forecast.step) if forecast else (None, None)
        predicted = predict_quantity(
            self.section.objective, spec, step.s if step else None, room.tensor_bytes if room else None
        )
        far_out = is_far_out_of_memory(forecast, self.machine)
        return SearchCandidate(values, point, predicted, not far_out, room.low_bytes if room else None)


def _shuffle(items: Sequence[_Item], seed: int, shares: Sequence[float]) -> list[_Item]:
    """Return items in a seeded-random order, in which each next item is drawn in proportion to its share (Efraimidis
    and Spirakis, 2006)."""
    generator = random.Random(seed)
    if len(set(shares)) < 2:
        return generator.sample(items, len(items))
    keys = [generator.expovariate(share) for share in shares]
    return [items[at] for at in sorted(range(len(items)), key=keys.__getitem__)]
