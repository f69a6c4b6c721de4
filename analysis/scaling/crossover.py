"""Crossovers: node counts between which one engine becomes faster than another. Only measured node counts are compared.

The table has a row per node count of each pair of curves, called `one` and `other`. Columns `one_*` and `other_*`
describe the two configurations at this node count. The column `ratio` is the seconds per sample of `one` divided by
those of `other`, and `verdict` states whether `one` is faster. The column `found` is the outcome of the search for a
crossover as a word, and `told` is the outcome as a sentence.
"""

import itertools
from collections.abc import Sequence
from typing import Literal, NamedTuple

import pandas as pd

from analysis.questions import describe_engine
from analysis.results import Results
from analysis.scaling import (
    BASIS,
    BATCH,
    Pace,
    Paces,
    add_interval_names,
    build_basis_cells,
    build_frame,
    build_ratio_cells,
    paces,
)
from analysis.scaling.best import compare_fastest, ranked
from analysis.scaling.curves import BatchChoice, Law, Track, differ_in_engine, list_tracks
from analysis.stats.compare import TOO_FEW, Comparison, Verdict, judge_interval, verdicts
from analysis.summary import Row
from analysis.table import group_by
from bench.core.statistics import LEVEL

_SIDE = ("config_id", *BATCH, "n", "outcome", "sample_s", "step_s", "flags")
COLUMNS = (
    "law", "batch", "one", "other", "machine", "environment_id", "model", "nodes", "devices_per_node",
    *(f"{side}_{name}" for side in ("one", "other") for name in _SIDE),
    *add_interval_names("ratio"), *BASIS, "verdict", "found", "told",
)  # fmt: skip

CrossoverOutcome = Literal["between", "none seen", "cannot be told"]

_DECIDED = ("faster", "slower")


class NodeComparison(NamedTuple):
    """Comparison of two engines, `one` and `other`, at one node count."""

    nodes: int
    one: Row | None  # row of the first engine; None if it was never requested
    other: Row | None  # row of the second engine
    comparison: Comparison | None  # seconds per sample, `one` divided by `other`; None if either has no step times
    verdict: Verdict | None  # on `one`, corrected for the number of node counts


class Crossover(NamedTuple):
    """Comparison of two engines over node counts, with all other settings equal."""

    law: Law
    batch: BatchChoice
    names: tuple[str, str]  # names of the two curves
    engines: tuple[str, str]  # names of the two engines, with options that differ from the preset
    node_comparisons: tuple[NodeComparison, ...]  # smallest node count first

    @property
    def rows(self) -> list[Row]:
        """The summary rows of both engines at all node counts."""
        return [row for at in self.node_comparisons for row in (at.one, at.other) if row]

    @property
    def any_row(self) -> Row | None:
        """Any summary row of the comparison; None if there is no row. Read only columns that are equal in all rows of
        the comparison."""
        return next(iter(self.rows), None)

    @property
    def between(self) -> tuple[tuple[int, int], ...]:
        """Pairs of node counts between which there is a crossover. The engine that is detectably faster at the first
        node count of a pair is detectably slower at the second."""
        decided = [at for at in self.node_comparisons if at.verdict in _DECIDED]
        pairs = itertools.pairwise(decided)
        return tuple((one.nodes, other.nodes) for one, other in pairs if one.verdict != other.verdict)

    @property
    def found(self) -> CrossoverOutcome:
        """Outcome of the search for a crossover. It is "between" if there is a crossover.

        The outcome is "none seen" if one engine is detectably faster at the smallest and at the largest compared node
        count, and the other engine is not detectably faster at any node count. In all other cases it is "cannot be
        told".
        """
        if self.between:
            return "between"
        compared = [at.verdict for at in self.node_comparisons if at.verdict]
        settled = len(compared) > 1 and compared[0] in _DECIDED and compared[-1] in _DECIDED
        return "none seen" if settled else "cannot be told"

    @property
    def sentence(self) -> str:
        """The outcome as a sentence, such as "zero3 overtakes zero2 between 2 and 4 nodes"."""
        one, other = self.engines
        if self.found == "between":
            verdicts_by_nodes = {at.nodes: at.verdict for at in self.node_comparisons}
            texts = []
            for before, after in self.between:
                faster, slower = (one, other) if verdicts_by_nodes[after] == "faster" else (other, one)
                texts.append(f"{faster} overtakes {slower} between {before} and {after} nodes")
            return "; ".join(texts)
        if self.found == "cannot be told":
            few = any(at.verdict == TOO_FEW for at in self.node_comparisons)
            return f"unknown whether {one} and {other} cross{f': {TOO_FEW}' if few else ''}"
        first, *_, last = [at for at in self.node_comparisons if at.verdict]
        faster, slower = (one, other) if first.verdict == "faster" else (other, one)
        return f"no crossover seen: {faster} is faster than {slower} on {first.nodes} to {last.nodes} nodes"


def find_crossovers(results: Results) -> list[Crossover]:
    """Return the comparisons of `zero2` with `zero3` over node counts, to find the node count at which one engine
    overtakes the other (crossover). Two scaling curves are compared if they differ only in the engine."""
    pace = paces(results)
    by_engine = group_by(list_tracks(results), lambda track: str(track.any_row["engine"]))
    return [
        _compare_tracks(one, other, pace)
        for one in by_engine.get("zero2", ())
        for other in by_engine.get("zero3", ())
        if differ_in_engine(one, other)
    ]


def build_crossover_table(found: Sequence[Crossover]) -> pd.DataFrame:
    """Return a table with a row for each node count at which two engines were compared."""
    return build_frame(
        [_build_cells(crossover, at) for crossover in found for at in crossover.node_comparisons], COLUMNS
    )


def _compare_tracks(one: Track, other: Track, pace: Paces) -> Crossover:
    compared = []
    for nodes in sorted({*one.by_nodes, *other.by_nodes}):
        (ours, before), (theirs, after) = (_rank(track, nodes, pace) for track in (one, other))
        comparison = compare_fastest(before, after) if before and after else None
        compared.append(NodeComparison(nodes, ours, theirs, comparison, None))
    decided = iter(_decide(one, other, [at for at in compared if at.comparison], pace))
    judged = tuple(at._replace(verdict=next(decided)) if at.comparison else at for at in compared)
    names = describe_engine(one.spec, other.spec), describe_engine(other.spec, one.spec)
    return Crossover(one.law, one.batch, (one.name, other.name), names, judged)


def _decide(one: Track, other: Track, compared: Sequence[NodeComparison], pace: Paces) -> list[Verdict]:
    """Return the verdict for each node count. The verdicts are corrected for the number of node counts, so that the
    probability of at least one wrong verdict is limited.

    On curves of the best micro-batch, the same times that are compared have also selected the micro-batch. Verdicts are
    then based on intervals that allow for this selection, with Bonferroni's correction.
    """
    if one.batch == "equal micro-batch":
        return verdicts([at.comparison for at in compared if at.comparison])
    # the corrected p-values of `verdicts` do not allow for the selection of micro-batches
    level = 1 - (1 - LEVEL) / max(len(compared), 1)
    ranked_paces = [[_rank(track, at.nodes, pace)[1] for track in (one, other)] for at in compared]
    found = [compare_fastest(ours, theirs, level) for ours, theirs in ranked_paces]
    return [judge_interval(each.interval) if each.decides and each.interval else TOO_FEW for each in found]


def _rank(track: Track, nodes: int, pace: Paces) -> tuple[Row | None, list[Pace]]:
    """Return two results for a track (the rows of one scaling curve) at a node count. The first is the summary row of
    the fastest micro-batch. If all micro-batches failed, the row of the smallest micro-batch is returned. If the track
    has no row at this node count, None is returned.

    The second result is the measured seconds per sample of all micro-batches, the fastest first. `pace` returns the
    seconds per sample of a row.
    """
    rows = track.by_nodes.get(nodes, ())
    ranking = ranked(rows, pace)
    if ranking is None:
        return min(rows, key=lambda row: row["micro"], default=None), []
    return ranking.fastest, [found for row in ranking.rows if (found := pace(row))]


def _build_cells(crossover: Crossover, at: NodeComparison) -> Row:
    sides = {"one": at.one or {}, "other": at.other or {}}
    return {
        **sides["other"],
        **sides["one"],
        "nodes": at.nodes,
        "law": crossover.law,
        "batch": crossover.batch,
        "found": crossover.found,
        "told": crossover.sentence,
        **dict(zip(sides, crossover.names, strict=True)),
        **{f"{side}_{name}": row.get(name) for side, row in sides.items() for name in _SIDE},
        **build_ratio_cells("ratio", at.comparison),
        **build_basis_cells(at.comparison),
        "verdict": at.verdict,
    }
