"""Crossovers: node counts between which one engine overtakes another. Only measured node counts are compared.

The table has a row per node count of each pair of curves, one and other: the configurations as `one_*` and `other_*`,
the ratio of seconds per sample, the one's over the other's, the verdict on the one, and the crossover as a word (found)
and as a sentence (told).
"""

import itertools
from collections.abc import Mapping, Sequence
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
    """Two engines at one node count."""

    nodes: int
    one: Row | None  # None if it was never requested
    other: Row | None
    comparison: Comparison | None  # seconds per sample, the one's over the other's; None if a side has no number
    verdict: Verdict | None  # on the one, corrected for the node counts of its crossover


class Crossover(NamedTuple):
    """Two engines over node counts, all else equal."""

    law: Law
    batch: BatchChoice
    names: tuple[str, str]  # of their curves
    engines: tuple[str, str]  # their names, with options that differ from the preset
    node_comparisons: tuple[NodeComparison, ...]  # the smallest node count first

    @property
    def any_row(self) -> Row | None:
        """A row of the summary for what all rows share; None if there is no row."""
        return next((row for at in self.node_comparisons for row in (at.one, at.other) if row), None)

    @property
    def between(self) -> tuple[tuple[int, int], ...]:
        """Node counts between which the detectably faster engine becomes the detectably slower one."""
        decided = [at for at in self.node_comparisons if at.verdict in _DECIDED]
        pairs = itertools.pairwise(decided)
        return tuple((one.nodes, other.nodes) for one, other in pairs if one.verdict != other.verdict)

    @property
    def found(self) -> CrossoverOutcome:
        """The outcome. "None seen" needs verdicts for the same engine at the smallest and largest compared node count,
        and none for the other engine between them."""
        if self.between:
            return "between"
        compared = [at.verdict for at in self.node_comparisons if at.verdict]
        settled = len(compared) > 1 and compared[0] in _DECIDED and compared[-1] in _DECIDED
        return "none seen" if settled else "cannot be told"

    @property
    def sentence(self) -> str:
        """The outcome in words, e.g. "zero3 overtakes zero2 between 2 and 4 nodes"."""
        one, other = self.engines
        if self.found == "between":
            verdicts_by_nodes = {at.nodes: at.verdict for at in self.node_comparisons}
            return "; ".join(
                "{} overtakes {} between {} and {} nodes".format(
                    *(self.engines if verdicts_by_nodes[after] == "faster" else self.engines[::-1]), before, after
                )
                for before, after in self.between
            )
        if self.found == "cannot be told":
            few = any(at.verdict == TOO_FEW for at in self.node_comparisons)
            return f"whether {one} and {other} cross cannot be told{f': {TOO_FEW}' if few else ''}"
        first, *_, last = [at for at in self.node_comparisons if at.verdict]
        faster, slower = (one, other) if first.verdict == "faster" else (other, one)
        return f"no crossover seen: {faster} is faster than {slower} on {first.nodes} to {last.nodes} nodes"


def find_crossovers(results: Results, pairs: Sequence[tuple[str, str]] = (("zero2", "zero3"),)) -> list[Crossover]:
    """Return the crossover of each pair of engines on every pair of curves that differ only in the engine."""
    pace = paces(results)
    by_engine = group_by(list_tracks(results), lambda track: str(track.any_row["engine"]))
    return [
        _compare_tracks(one, other, pace)
        for pair in pairs
        for one in by_engine.get(pair[0], ())
        for other in by_engine.get(pair[1], ())
        if differ_in_engine(one, other)
    ]


def build_crossover_table(found: Sequence[Crossover]) -> pd.DataFrame:
    """Return a row per node count of each pair of curves."""
    return build_frame(
        [_build_cells(crossover, at) for crossover in found for at in crossover.node_comparisons], COLUMNS
    )


def _compare_tracks(one: Track, other: Track, pace: Paces) -> Crossover:
    compared = []
    for nodes in sorted({*one.by_nodes, *other.by_nodes}):
        ours, theirs = (_select_row(track.by_nodes, nodes, pace) for track in (one, other))
        before, after = (_list_paces(track, nodes, pace) for track in (one, other))
        comparison = compare_fastest(before, after) if before and after else None
        compared.append(NodeComparison(nodes, ours, theirs, comparison, None))
    decided = iter(_decide(one, other, [at for at in compared if at.comparison], pace))
    judged = tuple(at._replace(verdict=next(decided)) if at.comparison else at for at in compared)
    names = describe_engine(one.spec, other.spec), describe_engine(other.spec, one.spec)
    return Crossover(one.law, one.batch, (one.name, other.name), names, judged)


def _decide(one: Track, other: Track, compared: Sequence[NodeComparison], pace: Paces) -> list[Verdict]:
    """Return the verdicts on all node counts together.

    If the micro-batch was chosen from the same data, they rest on intervals that allow for that selection, at the level
    that all node counts together need (Bonferroni's inequality).
    """
    if one.batch == "equal micro-batch":
        return verdicts([at.comparison for at in compared if at.comparison])
    # the corrected p-values of `verdicts` do not allow for the selection of micro-batches
    level = 1 - (1 - LEVEL) / max(len(compared), 1)
    found = [
        compare_fastest(_list_paces(one, at.nodes, pace), _list_paces(other, at.nodes, pace), level) for at in compared
    ]
    return [judge_interval(each.interval) if each.decides and each.interval else TOO_FEW for each in found]


def _list_paces(track: Track, nodes: int, pace: Paces) -> list[Pace]:
    """Return the known paces of all micro-batches of a track at a node count, the fastest first."""
    ranking = ranked(track.by_nodes.get(nodes, ()), pace)
    return [found for row in ranking.rows if (found := pace(row))] if ranking else []


def _select_row(by_nodes: Mapping[int, Sequence[Row]], nodes: int, pace: Paces) -> Row | None:
    """Return the row of a track at a node count: the fastest or, if all failed, that of the smallest micro-batch."""
    rows = by_nodes.get(nodes, ())
    ranking = ranked(rows, pace)
    return ranking.fastest if ranking else min(rows, key=lambda row: row["micro"], default=None)


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
