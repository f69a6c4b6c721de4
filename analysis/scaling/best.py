"""The best configurations of a question: the fastest, those that tie with it, and throughput against memory.

The table has a row per configuration of each question, the fastest first, those that failed last, with columns of the
summary and these of its own:
standing        fastest, equal within 3 %, tied, slower, failed, busy, or too few repeats to tell
ratio           seconds per sample over the fastest's
pareto          front, tied, dominated, or too few repeats to tell
memory_ratio    seconds per sample over the fastest of those that need no more memory, with its memory_verdict
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from analysis.questions import Question, describe_choice, group_by_question, tell_apart
from analysis.results import Results
from analysis.scaling.time_per_sample import (
    BASIS,
    PLACE,
    TIME,
    WHERE,
    Pace,
    Paces,
    add_interval_names,
    build_basis_cells,
    build_frame,
    build_ratio_cells,
    compare_paces,
    paces,
    read_once,
)
from analysis.stats.compare import EQUAL, TIES, TOO_FEW, Comparison, Verdict, enough, judge_interval, superiority
from analysis.stats.family import Family
from analysis.stats.intervals import Interval
from analysis.summary import Row, is_disturbed
from bench.core.statistics import LEVEL


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
    def selection_bias(self) -> float:
        """By which part the time of the fastest is probably shorter than it truly is, for it was chosen as the
        fastest."""
        return float(np.expm1(self._family.selection_bias)) if self._family else 0.0

    def compare(self, one: Pace, other: Pace) -> Comparison:
        """Compare two configurations; those that are not of the family by themselves."""
        places = [self._places.get(id(pace)) for pace in (one, other)]
        if self._family is None or places[0] is None or places[1] is None:
            return compare_paces(one, other)
        ours, theirs = (self._means[place] for place in places if place is not None)
        value, margin = self._family.gap(places[0], places[1])
        low, high = (float(np.exp(end)) for end in (value - margin, value + margin))
        runs = len(ours), len(theirs)
        interval = Interval(low, high, "between repeats", self._level, sum(runs))
        p_value = compare_paces(one, other).p_value
        return Comparison(float(np.exp(value)), interval, p_value, superiority(ours, theirs), "run", runs)

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


COLUMNS = (
    *WHERE,
    *PLACE,
    *TIME,
    *add_interval_names("tokens_per_s"),
    "peak_allocated_bytes",
    "standing",
    *add_interval_names("ratio"),
    *BASIS,
    "pareto",
    *add_interval_names("memory_ratio"),
    "memory_verdict",
    "flags",
    "reason",
)

Place = Literal["front", "tied", "dominated", "too few repeats to tell"]
"""Front: none that needs no more memory is faster. Tied: one is, but not detectably. Dominated: detectably. Or one is,
as measured, and there are too few repeats to tell."""

_PLACES: Mapping[Verdict, Place] = {"slower": "dominated", TOO_FEW: TOO_FEW}


_RANK_LABELS: Mapping[Verdict, str] = {"slower": "slower", EQUAL: EQUAL, TOO_FEW: TOO_FEW}


class ParetoPoint(NamedTuple):
    """A configuration in the plane of throughput and memory."""

    row: Row
    leaner: Row | None  # the fastest of those that need no more memory; None for the leanest of all
    comparison: Comparison | None  # seconds per sample, its own over that one's
    verdict: Verdict | None  # corrected for the number of configurations; of one on the front, what more memory buys

    @property
    def place(self) -> Place:
        if self.comparison is None or self.comparison.ratio < 1:
            return "front"
        return _PLACES.get(self.verdict, "tied") if self.verdict else "tied"


class Best(NamedTuple):
    """The answer to one question, in rows of the summary."""

    question: Question
    fastest: Row | None  # of the lowest seconds per sample, as measured; None where nothing was measured
    rivals: tuple[Rival, ...]  # all others with a number, the fastest first
    pareto_points: tuple[ParetoPoint, ...]  # all whose memory is known, the leanest first
    failed: tuple[Row, ...]
    busy: tuple[Row, ...] = ()  # all of whose runs are flagged busy, so that they are ranked nowhere
    selection_bias: float = 0.0  # relative, of the fastest's time

    @property
    def ties(self) -> tuple[Row, ...]:
        """The rivals that repeats do not find slower than the fastest, the fastest of them first."""
        return tuple(rival.row for rival in self.rivals if rival.verdict in TIES)

    @property
    def undecided(self) -> tuple[Row, ...]:
        """The rivals behind the fastest as measured that there are too few repeats to tell of."""
        return tuple(rival.row for rival in self.rivals if rival.verdict == TOO_FEW)

    @property
    def front(self) -> tuple[Row, ...]:
        """The Pareto front of throughput against peak allocated bytes, the leanest first."""
        return tuple(pareto_point.row for pareto_point in self.pareto_points if pareto_point.place == "front")


@read_once
def best(results: Results) -> tuple[Best, ...]:
    """Return one answer per question, in the order of `questions.by_question`. Where the evidence is not measured
    there is no fastest: a rehearsal communicates nothing, so it ranks nothing."""
    pace = paces(results)
    groups = group_by_question(results.summary)
    named = [(question, tell_apart(rows, results.specs, describe_choice)) for question, rows in groups]
    return tuple(_best(question, rows, pace) for question, rows in named)


def as_table(found: Sequence[Best]) -> pd.DataFrame:
    """Return a row per configuration of each question."""
    return build_frame([cells for best in found for cells in _cells(best)], COLUMNS)


def _best(question: Question, rows: Sequence[Row], pace: Paces) -> Best:
    failed = tuple(row for row in rows if not row["n"])
    busy = tuple(row for row in rows if row["n"] and is_disturbed(row))
    ranking = ranked(rows, pace) if question["evidence"] == "measured" else None
    if ranking is None:
        return Best(question, None, (), (), failed, busy)
    points = _list_pareto_points(ranking, pace)
    return Best(question, ranking.fastest, ranking.rivals, points, failed, busy, ranking.family.selection_bias)


def _list_pareto_points(ranking: Ranking, pace: Paces) -> tuple[ParetoPoint, ...]:
    """Compare each configuration with one other, the fastest that is as lean: one is enough to dominate it."""
    return tuple(
        one._replace(verdict=ranking.family.verdict(one.comparison)) if one.comparison else one
        for one in _compare_with_leaner(ranking, pace)
    )


def _compare_with_leaner(ranking: Ranking, pace: Paces) -> Iterator[ParetoPoint]:
    sized = [row for row in ranking.rows if row["peak_allocated_bytes"] is not None]
    front: tuple[Row, Pace] | None = None
    for row in sorted(sized, key=lambda row: row["peak_allocated_bytes"]):  # of equals the fastest comes first
        own_pace = pace(row)
        assert own_pace is not None  # it was ranked
        comparison = ranking.family.compare(own_pace, front[1]) if front else None
        yield ParetoPoint(row, front and front[0], comparison, None)
        if comparison is None or comparison.ratio < 1:
            front = row, own_pace


def _cells(best: Best) -> Iterator[Row]:
    pareto_points = {pareto_point.row["config_id"]: pareto_point for pareto_point in best.pareto_points}
    if best.fastest:
        yield {**best.fastest, "standing": "fastest", **_stood(pareto_points.get(best.fastest["config_id"]))}
    for rival in best.rivals:
        values = {"standing": _RANK_LABELS.get(rival.verdict, "tied"), **build_basis_cells(rival.comparison)}
        stood = _stood(pareto_points.get(rival.row["config_id"]))
        yield {**rival.row, **values, **build_ratio_cells("ratio", rival.comparison), **stood}
    yield from ({**row, "standing": "busy"} for row in best.busy)
    yield from ({**row, "standing": "failed"} for row in best.failed)


def _stood(pareto_point: ParetoPoint | None) -> Row:
    if pareto_point is None:
        return {}
    ratio = build_ratio_cells("memory_ratio", pareto_point.comparison)
    return {"pareto": pareto_point.place, "memory_verdict": pareto_point.verdict, **ratio}
