"""The values that a search may take: listed where they are few, drawn where a range has too many. Pure."""

import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping
from typing import Any

from bench.search_section import MOST_LISTED, Dimension, SearchSection
from bench.study import Pair

Values = dict[str, Any]
"""By dimension, one of its values; a dimension whose condition does not hold is left out."""
_MOST_DRAWS = 20  # per value that is wanted: a small space may be given as ranges


class SearchSpace:
    """The dimensions of a space in their order; each may depend on those before it."""

    def __init__(self, section: SearchSection, base: Mapping[str, Any] | None = None) -> None:
        """`base` are fields with one value, which conditions may name too."""
        self.dimensions, self._base = section.space, dict(base or {})

    def is_active(self, key: str, before: Mapping[str, Any]) -> bool:
        """Whether a dimension is set, by the values of those before it."""
        fields = self._base | dict(list_pairs(before))
        return all(fields.get(name) in allowed for name, allowed in self.dimensions[key].when.items())

    def iterate(self) -> Iterator[Values] | None:
        """Yield all values in the order of the dimensions, the last varying fastest; None where a range has too many
        to be listed."""
        if any(dimension.list_values() is None for dimension in self.dimensions.values()):
            return None
        return self._iterate_from({}, list(self.dimensions))

    def _iterate_from(self, before: Values, keys: list[str]) -> Iterator[Values]:
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
        """Draw values at random: each of a list as likely, ratios where a range says so."""
        values: Values = {}
        for key, dimension in self.dimensions.items():
            if self.is_active(key, values):
                values[key] = _draw_value(dimension, generator)
        return values

    def list_all(self, most: int = MOST_LISTED) -> list[Values] | None:
        """Return all values in the order of the dimensions; None where there are more than `most`."""
        listed = self.iterate()
        found = None if listed is None else list(itertools.islice(listed, most + 1))
        return None if found is None or len(found) > most else found

    def list_candidates(self, seed: int, most: int = MOST_LISTED) -> list[Values]:
        """Return all values or, of a space with more than `most`, so many that are drawn."""
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
        """Return how likely values are to be drawn, relative to other values of a listed space."""
        return math.prod(self.dimensions[key].compute_share(value) for key, value in values.items())


def list_pairs(values: Mapping[str, Any]) -> list[Pair]:
    """Return the overrides that values of a space stand for; a mapping stands for several."""
    several = (value if isinstance(value, Mapping) else {key: value} for key, value in values.items())
    return [pair for fields in several for pair in fields.items()]


def format_key(values: Mapping[str, Any]) -> str:
    """Return what is equal for equal values."""
    return json.dumps(values, sort_keys=True)


def _draw_value(dimension: Dimension, generator: random.Random) -> Any:
    if dimension.count is not None and not dimension.log:
        return dimension.find_value(generator.randrange(dimension.count))
    assert dimension.from_ is not None and dimension.to is not None
    if not dimension.log:
        return generator.uniform(dimension.from_, dimension.to)
    if not dimension.whole:
        return math.exp(generator.uniform(math.log(dimension.from_), math.log(dimension.to)))
    low, high = math.log(dimension.from_ - 0.5), math.log(dimension.to + 0.5)  # each whole number has its own share
    return min(max(round(math.exp(generator.uniform(low, high))), int(dimension.from_)), int(dimension.to))
