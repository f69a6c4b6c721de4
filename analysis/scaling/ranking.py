"""The fastest of several configurations, and which of the others are detectably slower."""

from collections.abc import Sequence
from typing import NamedTuple

from analysis.scaling.pace import Paces, against
from analysis.stats.compare import Comparison, Verdict, verdicts
from analysis.summary import Row


class Rival(NamedTuple):
    """A configuration beside the fastest."""

    row: Row
    comparison: Comparison  # seconds per sample, its own over the fastest's
    verdict: Verdict  # of the rival, corrected for the number of rivals


class Ranking(NamedTuple):
    """Configurations by their seconds per sample, the fastest first."""

    fastest: Row
    rivals: tuple[Rival, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        return (self.fastest, *(rival.row for rival in self.rivals))

    @property
    def ties(self) -> tuple[Row, ...]:
        """The rivals that repeats do not find slower. Where all have enough of them, the true fastest is among these
        and `fastest` in 95 of 100 rankings; the fastest measured of many alike was also lucky, so its own number
        flatters it."""
        return tuple(rival.row for rival in self.rivals if rival.verdict == "no detectable difference")


def ranked(rows: Sequence[Row], pace: Paces) -> Ranking | None:
    """Rank those of `rows` that have a number; None where none has."""
    timed = sorted(((known.typical, place) for place, row in enumerate(rows) if (known := pace(row))))
    found: Ranking | None = None
    for _, place in timed:
        found = _behind(rows[place], [rows[other] for _, other in timed if other != place], pace)
        if all(rival.comparison.ratio >= 1 for rival in found.rivals):
            break  # nearly always at once: within shared allocations the order may be another
    return found


def _behind(fastest: Row, others: Sequence[Row], pace: Paces) -> Ranking:
    lead, paces = pace(fastest), [pace(row) for row in others]
    comparisons = [against(other, lead) for other in paces if other and lead]
    told = zip(others, comparisons, verdicts(comparisons), strict=True)
    return Ranking(fastest, tuple(sorted((Rival(*one) for one in told), key=lambda rival: rival.comparison.ratio)))
