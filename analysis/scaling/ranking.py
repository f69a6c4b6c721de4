"""The fastest of several configurations, and which of the others are detectably slower."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from analysis.scaling.time_per_sample import Pace, Paces, compare_paces
from analysis.stats.compare import TIES, TOO_FEW, Comparison, Verdict, enough, judge_interval, superiority
from analysis.stats.family import Family
from analysis.stats.interval import Interval
from analysis.summary import Row
from bench.statistics import LEVEL


class Rival(NamedTuple):
    """A configuration beside the fastest."""

    row: Row
    comparison: Comparison  # seconds per sample, its own over the fastest's; between repeats the interval holds for all
    verdict: Verdict  # of the rival, of all that were ranked together


class RankedFamily:
    """All configurations of a ranking that have enough repeats, as one family: whichever two of them are compared, all
    verdicts hold together.

    They are compared within the allocations that all of them ran in, where these are enough, else by all their runs.
    """

    def __init__(self, paces: Sequence[Pace], level: float = LEVEL) -> None:
        self._level = level
        self._paces = tuple(paces)  # kept, so that no other takes the place of one in memory
        self._places = {id(pace): place for place, pace in enumerate(paces)}
        by_pace = [pace.means for pace in paces]
        shared = [name for name in by_pace[0] if all(name in means for means in by_pace)] if by_pace else []
        blocked = enough(shared) and len(paces) > 1
        self._means = [[means[name] for name in (shared if blocked else means)] for means in by_pace]
        self._family = Family([np.log(means) for means in self._means], level, blocked=blocked) if paces else None

    @property
    def lead(self) -> Pace | None:
        """The fastest of the family as measured; None of an empty one."""
        return self._paces[self._family.lead] if self._family else None

    @property
    def luck(self) -> float:
        """By which part the time of the fastest is probably shorter than it truly is, for it was chosen as the
        fastest."""
        return float(np.expm1(self._family.luck)) if self._family else 0.0

    def compare(self, one: Pace, other: Pace) -> Comparison:
        """Compare two configurations; those that are not of the family by themselves."""
        places = [self._places.get(id(pace)) for pace in (one, other)]
        if self._family is None or places[0] is None or places[1] is None:
            return compare_paces(one, other)
        ours, theirs = (self._means[place] for place in places if place is not None)
        value, reach = self._family.gap(places[0], places[1])
        low, high = (float(np.exp(end)) for end in (value - reach, value + reach))
        runs = len(ours), len(theirs)
        interval = Interval(low, high, "between repeats", self._level, sum(runs))
        chance = compare_paces(one, other).p
        return Comparison(float(np.exp(value)), interval, chance, superiority(ours, theirs), "run", runs)

    def verdict(self, comparison: Comparison) -> Verdict:
        """Return what a comparison of the family tells."""
        if not comparison.decides or comparison.interval is None:
            return TOO_FEW
        return judge_interval(comparison.interval)


class Ranking(NamedTuple):
    """Configurations by their seconds per sample, the fastest first."""

    fastest: Row
    rivals: tuple[Rival, ...]
    family: RankedFamily

    @property
    def rows(self) -> tuple[Row, ...]:
        return (self.fastest, *(rival.row for rival in self.rivals))

    @property
    def ties(self) -> tuple[Row, ...]:
        """The rivals that repeats do not find slower. Where all have enough of them, no rival that is as fast as the
        fastest measured is called slower in 95 of 100 rankings; the fastest measured of many alike was also lucky, so
        its own number flatters it."""
        return tuple(rival.row for rival in self.rivals if rival.verdict in TIES)


def ranked(rows: Sequence[Row], pace: Paces) -> Ranking | None:
    """Rank those of `rows` that have a number; None where none has."""
    timed = [(row, known) for row in rows if (known := pace(row))]
    if not timed:
        return None
    family = RankedFamily([known for _, known in timed if enough(known.runs)])
    fastest = min(timed, key=lambda one: one[1].typical)
    found = _behind(next((one for one in timed if one[1] is family.lead), fastest), timed, family)
    if found.rivals and found.rivals[0].comparison.ratio < 1:  # of one that has too few repeats to be of the family
        found = _behind(fastest, timed, family)
    return found


def compare_fastest(ours: Sequence[Pace], theirs: Sequence[Pace], level: float = LEVEL) -> Comparison:
    """Compare the fastest of several configurations, which stands first, with the fastest of others.

    The interval holds although the data that were compared chose both. Of several gaps whose intervals hold together,
    the smallest over `ours` of the largest over `theirs` lies between the same of their lower and of their upper ends;
    and that is the gap of the truly fastest, whichever they are.
    """
    plain = compare_paces(ours[0], theirs[0], level)
    if len(ours) == len(theirs) == 1 or not plain.decides:
        return plain
    one, other = ([pace for pace in side if enough(pace.runs)] for side in (ours, theirs))
    family = RankedFamily([*one, *other], level)
    ends = [[known for b in other if (known := family.compare(a, b).interval)] for a in one]
    low = min(max(interval.low for interval in of_one) for of_one in ends)
    high = min(max(interval.high for interval in of_one) for of_one in ends)
    n = sum(len(pace.runs) for pace in (*one, *other))
    interval = Interval(min(low, plain.ratio), max(high, plain.ratio), "between repeats", level, n)
    return plain._replace(interval=interval)


def _behind(lead: tuple[Row, Pace], timed: Sequence[tuple[Row, Pace]], family: RankedFamily) -> Ranking:
    compared = [(row, family.compare(pace, lead[1])) for row, pace in timed if row is not lead[0]]
    rivals = [Rival(row, comparison, family.verdict(comparison)) for row, comparison in compared]
    return Ranking(lead[0], tuple(sorted(rivals, key=lambda rival: rival.comparison.ratio)), family)
