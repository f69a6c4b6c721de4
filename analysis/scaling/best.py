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

import pandas as pd

from analysis.questions import Question, describe_choice, group_by_question
from analysis.results import Results
from analysis.scaling.cached import read_once
from analysis.scaling.columns import (
    BASIS,
    PLACE,
    TIME,
    WHERE,
    add_interval_names,
    build_basis_cells,
    build_frame,
    build_ratio_cells,
)
from analysis.scaling.ranking import Ranking, Rival, ranked
from analysis.scaling.time_per_sample import Pace, Paces, paces
from analysis.stats.compare import EQUAL, TIES, TOO_FEW, Comparison, Verdict
from analysis.summary import Row, is_disturbed
from analysis.variants import tell_apart

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
    luck: float = 0.0  # by which part the fastest's time is probably too short, for it was chosen as the fastest

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
    return Best(question, ranking.fastest, ranking.rivals, points, failed, busy, ranking.family.luck)


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
