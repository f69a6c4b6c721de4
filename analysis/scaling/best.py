"""Best configurations of a question: the fastest, its ties, and the Pareto front of throughput and memory. For
trainings, also the configuration with the lowest held-out loss, and its ties.

A question is a group of configurations that do the same work on equal hardware. The table has a row per configuration
of each question, the fastest first and failures last. It has the columns of the summary and these:

question        name of the question.
standing        fastest, equal within 3 %, tied, slower, failed, busy, or too few repeats to tell.
ratio           seconds per sample, divided by the seconds per sample of the fastest configuration.
pareto          front, tied, dominated, or too few repeats to tell.
memory_ratio    seconds per sample, divided by the seconds per sample of another configuration: the fastest of all
                others that need as much memory as this configuration or less.
memory_verdict  the verdict on memory_ratio.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd

from analysis.questions import (
    Question,
    describe_choice,
    describe_differing_fields,
    describe_variants,
    group_by_question,
    name_question,
    tell_apart,
)
from analysis.results import Results
from analysis.scaling import (
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
from analysis.summary import KEY, Row, is_disturbed
from analysis.table import group_by, list_rows
from bench.core.point_fields import flatten
from bench.core.spec import RunSpec
from bench.core.statistics import LEVEL


class Rival(NamedTuple):
    """A configuration that is compared with the fastest of all configurations that do the same work on equal
    hardware."""

    row: Row
    # seconds per sample, divided by those of the fastest; intervals between repeats hold together
    comparison: Comparison
    verdict: Verdict  # on the rival, corrected for the number of configurations ranked together


class RankedFamily:
    """Configurations with enough repeats that are ranked together. The probability that at least one verdict on a pair
    of them is wrong is limited to 1 - `level`.

    The configurations are compared within the allocations that all of them share. If they share too few allocations,
    all runs of each configuration are compared.
    """

    def __init__(self, paces: Sequence[Pace], level: float = LEVEL) -> None:
        self._level = level
        self._paces = tuple(paces)  # keeps the objects alive, because their ids are keys
        self._places = {id(pace): place for place, pace in enumerate(paces)}
        by_pace = [pace.means for pace in paces]
        shared = [name for name in by_pace[0] if all(name in means for means in by_pace)] if by_pace else []
        blocked = enough(shared) and len(paces) > 1
        self._means = [[means[name] for name in (shared if blocked else means)] for means in by_pace]
        self._family = Family([np.log(means) for means in self._means], level, blocked=blocked) if paces else None

    @property
    def lead(self) -> Pace | None:
        """The times of the configuration with the shortest measured time per sample; None if the family (the
        configurations that are ranked together) is empty."""
        return self._paces[self._family.lead] if self._family else None

    @property
    def selection_bias(self) -> float:
        """Selection bias: the relative amount by which the fastest measured time is probably too short, because the
        shortest of several noisy times was selected."""
        return float(np.expm1(self._family.selection_bias)) if self._family else 0.0

    def compare(self, one: Pace, other: Pace) -> Comparison:
        """Compare two configurations. If both are in the family, which is the set of configurations ranked together,
        the confidence level holds for all pairs of the family at once. Otherwise it holds for this pair alone."""
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
        """Return the verdict on a comparison of two configurations of the family (the configurations that are ranked
        together)."""
        if not comparison.decides or comparison.interval is None:
            return TOO_FEW
        return judge_interval(comparison.interval)


class Ranking(NamedTuple):
    """Configurations sorted by seconds per sample, the fastest first."""

    fastest: Row
    rivals: tuple[Rival, ...]
    family: RankedFamily

    @property
    def rows(self) -> tuple[Row, ...]:
        return (self.fastest, *(rival.row for rival in self.rivals))

    @property
    def ties(self) -> tuple[Row, ...]:
        """The rivals that are not detectably slower than the fastest.

        If all configurations have enough repeats, errors are rare: in at most 5 of 100 rankings, a rival is called
        slower although it is truly as fast as the fastest. The measured time of the fastest itself is biased, because
        the shortest of several noisy times was selected.
        """
        return tuple(rival.row for rival in self.rivals if rival.verdict in TIES)


def ranked(rows: Sequence[Row], pace: Paces) -> Ranking | None:
    """Rank the rows that have step times by their time per sample; None if no row has step times. `pace` returns the
    seconds per sample of a row at each timed step."""
    timed = [(row, known) for row in rows if (known := pace(row))]
    if not timed:
        return None
    family = RankedFamily([known for _, known in timed if enough(known.runs)])
    fastest = min(timed, key=lambda one: one[1].typical)
    found = _rank_after(next((one for one in timed if one[1] is family.lead), fastest), timed, family)
    # a rival with too few repeats for the family may be faster
    return _rank_after(fastest, timed, family) if found.rivals and found.rivals[0].comparison.ratio < 1 else found


def compare_fastest(ours: Sequence[Pace], theirs: Sequence[Pace], level: float = LEVEL) -> Comparison:
    """Compare the fastest configuration of `ours` with the fastest of `theirs`. The first element of each sequence is
    the fastest.

    The interval of the ratio allows for the fact that both configurations were selected from the same data. For each
    configuration of `ours`, take the largest of its true ratios to the configurations of `theirs`. The smallest of
    these largest ratios is the true ratio of the fastest two. The lower end of the interval is found in the same way
    from the lower ends of the intervals of all pairs, and the upper end from the upper ends. The result holds because
    the intervals of all pairs hold simultaneously.
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


def _rank_after(lead: tuple[Row, Pace], timed: Sequence[tuple[Row, Pace]], family: RankedFamily) -> Ranking:
    compared = [(row, family.compare(pace, lead[1])) for row, pace in timed if row is not lead[0]]
    rivals = [Rival(row, comparison, family.verdict(comparison)) for row, comparison in compared]
    return Ranking(lead[0], tuple(sorted(rivals, key=lambda rival: rival.comparison.ratio)), family)


COLUMNS = (
    "question", *WHERE, "adapter", *PLACE, *TIME, *add_interval_names("tokens_per_s"), "peak_allocated_bytes",
    "standing", *add_interval_names("ratio"), *BASIS, "pareto", *add_interval_names("memory_ratio"), "memory_verdict",
    "flags",
    "reason",
)  # fmt: skip

Place = Literal["front", "tied", "dominated", "too few repeats to tell"]
"""Result of comparing a configuration with all configurations that need at most as much memory.

front                    None of them was measured as faster.
dominated                One of them was measured as faster, and the difference is detectable.
tied                     One of them was measured as faster, but the difference is not detectable.
too few repeats to tell  One of them was measured as faster, but there are too few repeats for a verdict.
"""

_PLACES: Mapping[Verdict, Place] = {"slower": "dominated", TOO_FEW: TOO_FEW}


_RANK_LABELS: Mapping[Verdict, str] = {"slower": "slower", EQUAL: EQUAL, TOO_FEW: TOO_FEW}


class ParetoPoint(NamedTuple):
    """A configuration in the comparison of throughput and memory, with the verdict on whether it lies on the Pareto
    front."""

    row: Row
    leaner: Row | None  # fastest of the others that need as much memory as `row` or less; None if `row` needs least
    comparison: Comparison | None  # seconds per sample of `row`, divided by those of `leaner`
    verdict: Verdict | None  # on `comparison`, corrected for the number of configurations

    @property
    def place(self) -> Place:
        if self.comparison is None or self.comparison.ratio < 1:
            return "front"
        return _PLACES.get(self.verdict, "tied") if self.verdict else "tied"


class Best(NamedTuple):
    """The fastest configuration of one question, its rivals, and the Pareto front of all of them, as rows of the
    summary. A question is a group of configurations that do the same work on equal hardware."""

    question: Question
    fastest: Row | None  # lowest seconds per sample as measured; None if nothing was measured
    rivals: tuple[Rival, ...]  # all other rows with step times, the fastest first
    pareto_points: tuple[ParetoPoint, ...]  # all rows with known memory, the least memory first
    failed: tuple[Row, ...]  # rows without a run that ended ok
    busy: tuple[Row, ...] = ()  # rows whose runs were all disturbed by background load or a pause; not ranked
    selection_bias: float = 0.0  # relative amount by which the fastest time is probably too short

    @property
    def compared(self) -> tuple[Row, ...]:
        """The compared configurations: all rows with step times, the fastest first. The column `n` of a row counts its
        independent runs."""
        return (self.fastest, *(rival.row for rival in self.rivals)) if self.fastest else ()

    @property
    def ties(self) -> tuple[Row, ...]:
        """The rivals that are not detectably slower than the fastest configuration, sorted by measured time."""
        return tuple(rival.row for rival in self.rivals if rival.verdict in TIES)

    @property
    def undecided(self) -> tuple[Row, ...]:
        """The configurations with too few repeats for a verdict on whether they are slower than the fastest."""
        return tuple(rival.row for rival in self.rivals if rival.verdict == TOO_FEW)


@read_once
def best(results: Results) -> tuple[Best, ...]:
    """Return the best configurations of each question, in the order of `group_by_question`. A question is a group of
    configurations that do the same work on equal hardware.

    Only measured runs are ranked. A rehearsal does not communicate, so its times cannot rank configurations.
    """
    pace, found = paces(results), []
    for question, group in group_by_question(results.summary):
        rows = tell_apart(group, results.specs, describe_choice)
        failed = tuple(row for row in rows if not row["n"])
        busy = tuple(row for row in rows if row["n"] and is_disturbed(row))
        if ranking := ranked(rows, pace) if question["evidence"] == "measured" else None:
            points, bias = _list_pareto_points(ranking, pace), ranking.family.selection_bias
            found.append(Best(question, ranking.fastest, ranking.rivals, points, failed, busy, bias))
        else:
            found.append(Best(question, None, (), (), failed, busy))
    return tuple(found)


MOST_NATS = 100.0
"""Largest loss that is compared, so that its exponential is finite. A larger loss is compared as this one."""
_EVALUATED = (
    "model.name", "data.name", "data.options", "objective", "sequence", "learning.tokens", "learning.held_out",
    "learning.held_out_seed", "learning.evaluation_samples",
)  # fmt: skip
"""Fields of a training on which its held-out samples or its number of tokens depend, or groups of such fields. Held-out
losses are only compared between trainings that are equal in these fields."""


_SHOWN_DIGITS = 8  # of a hash


class LossRanking(NamedTuple):
    """Trainings of one model on equally many tokens, ranked by their held-out loss. All are evaluated on the same
    samples.

    Each seed of a configuration counts as one independent value. `ranking` compares perplexities, which are exp(loss).
    A comparison yields a ratio, and the logarithm of a ratio of perplexities is the difference of the losses.
    """

    ranking: Ranking
    losses: Mapping[tuple[str, ...], Sequence[float]]  # mean loss of each seed, by the row's values in KEY
    tokens: int
    name: str  # distinguishes it from other rankings of the same results; empty if there is only one
    stopped: int  # configurations that are not ranked, because all their trainings were stopped earlier
    mixed: int = 0  # configurations whose runs read different data from equally named files

    def list_losses(self, row: Row) -> Sequence[float]:
        """Return the held-out loss of each seed of a configuration."""
        return self.losses[itemgetter(*KEY)(row)]


@read_once
def rank_losses(results: Results) -> tuple[LossRanking, ...]:
    """Return the measured trainings ranked by held-out loss, one ranking for each combination of values of the fields
    `_EVALUATED` and of contents of the data. Losses are only comparable if these fields, such as the model and the
    held-out samples, are equal. The result is empty if no training has a held-out loss."""
    if "validation_loss" not in results.summary:
        return ()
    rows = [row for row in list_rows(results.summary) if row["seeds"] and row["evidence"] == "measured"]
    specs = {row["config_id"]: results.specs[row["config_id"]] for row in rows}

    def list_fields(row: Row) -> dict[str, str]:
        # A file may have been replaced by another with the same name.
        contents = ", ".join(one[:_SHOWN_DIGITS] for one in results.list_data(row))
        return _list_evaluation_fields(specs[row["config_id"]]) | {"contents of the data": contents}

    groups = group_by(rows, lambda row: tuple(list_fields(row).items()))
    fields = {str(place): dict(key) for place, key in enumerate(groups)}
    names = describe_differing_fields(list(fields), fields).values()
    return tuple(_rank_losses(results, *pair) for pair in zip(groups.values(), names, strict=True))


def _rank_losses(results: Results, group: Sequence[Row], name: str) -> LossRanking:
    ends = {row["config_id"]: results.specs[row["config_id"]].learning.end_tokens or 0 for row in group}
    # Losses at different places of a learning-rate schedule are not comparable.
    most = max(ends.values())
    specs = {one: results.configurations[one] for one, tokens in ends.items() if tokens == most}
    variants = describe_variants(specs)
    compared = [row | {"variant": variants[row["config_id"]]} for row in group if row["config_id"] in specs]
    rows = tell_apart(compared, specs, describe_choice)
    losses, paces = {}, {}
    for row in rows:
        key, by_seed = itemgetter(*KEY)(row), results.find_losses(row)
        losses[key] = tuple(by_seed.values())
        paces[key] = Pace({str(seed): [math.exp(min(loss, MOST_NATS))] for seed, loss in by_seed.items()})
    ranking = ranked(rows, lambda row: paces[itemgetter(*KEY)(row)])
    assert ranking is not None  # every row has a loss
    tokens = round(statistics.median(row["tokens_trained"] for row in rows))
    mixed = sum(len(results.list_data(row)) > 1 for row in rows)
    return LossRanking(ranking, losses, tokens, name, len(group) - len(rows), mixed)


def _list_evaluation_fields(spec: RunSpec) -> dict[str, str]:
    """Return the fields of a spec that must be equal for held-out losses to be compared (`_EVALUATED`), with their
    values as text."""
    return {
        name: str(value)
        for name, value in flatten(spec)
        if any(name == field or name.startswith(f"{field}.") for field in _EVALUATED)
    }


def as_table(found: Sequence[Best]) -> pd.DataFrame:
    """Return a table with a row per configuration, grouped by question (configurations that do the same work on equal
    hardware)."""
    asked = [best.question for best in found]
    cells = [{"question": name_question(best.question, asked), **cells} for best in found for cells in _cells(best)]
    left_out = ("adapter",) if asked and all(question["adapter"] == "none" for question in asked) else ()
    return build_frame(cells, [name for name in COLUMNS if name not in left_out])


def _list_pareto_points(ranking: Ranking, pace: Paces) -> tuple[ParetoPoint, ...]:
    """Return the ranked configurations with known memory, the least memory first. Each configuration is compared with
    the fastest of the other configurations that need as much memory or less. One comparison is enough, because a
    configuration that is faster than the fastest is also faster than the others. `pace` returns the seconds per sample
    of a row at each timed step."""
    sized = [row for row in ranking.rows if row["peak_allocated_bytes"] is not None]
    front: tuple[Row, Pace] | None = None
    points = []
    # stable sort: at equal memory the fastest is first
    for row in sorted(sized, key=lambda row: row["peak_allocated_bytes"]):
        own_pace = pace(row)
        assert own_pace is not None  # every ranked row has step times
        comparison = ranking.family.compare(own_pace, front[1]) if front else None
        verdict = ranking.family.verdict(comparison) if comparison else None
        points.append(ParetoPoint(row, front and front[0], comparison, verdict))
        if comparison is None or comparison.ratio < 1:
            front = row, own_pace
    return tuple(points)


def _cells(best: Best) -> Iterator[Row]:
    pareto_cells: dict[str, Row] = {}
    for point in best.pareto_points:
        cells = {"pareto": point.place, "memory_verdict": point.verdict}
        pareto_cells[point.row["config_id"]] = cells | build_ratio_cells("memory_ratio", point.comparison)
    if best.fastest:
        yield {**best.fastest, "standing": "fastest", **pareto_cells.get(best.fastest["config_id"], {})}
    for rival in best.rivals:
        values = {"standing": _RANK_LABELS.get(rival.verdict, "tied"), **build_basis_cells(rival.comparison)}
        values |= build_ratio_cells("ratio", rival.comparison)
        yield {**rival.row, **values, **pareto_cells.get(rival.row["config_id"], {})}
    yield from ({**row, "standing": "busy"} for row in best.busy)
    yield from ({**row, "standing": "failed"} for row in best.failed)
