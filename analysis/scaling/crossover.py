"""At which node count one engine overtakes another, or falls behind: only between node counts that were measured.

The table has a row per node count of each pair of curves, one and other: what was asked of either as `one_*` and
`other_*`, the ratio of seconds per sample, the one's over the other's, the verdict on the one, and whether and where
they cross in a word (found) and in a sentence.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

import pandas as pd

from analysis import questions
from analysis.results import Results
from analysis.scaling.best import compare_fastest, ranked
from analysis.scaling.comparable import BatchChoice, Law, Track, differ_in_engine, list_tracks
from analysis.scaling.time_per_sample import (
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
from analysis.stats.compare import TOO_FEW, Comparison, Verdict, judge_interval, verdicts
from analysis.summary import Row
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
    """Two engines at one node count; None is a side that was never asked for, a comparison without both numbers, a
    verdict without a comparison."""

    nodes: int
    one: Row | None
    other: Row | None
    comparison: Comparison | None  # seconds per sample, the one's over the other's
    verdict: Verdict | None  # of the one, corrected for the node counts of its crossover


class Crossover(NamedTuple):
    """Two engines over node counts, all else equal."""

    law: Law
    batch: BatchChoice
    names: tuple[str, str]  # of their curves
    engines: tuple[str, str]  # their names, with what sets either apart from its preset
    node_comparisons: tuple[NodeComparison, ...]  # the smallest node count first

    @property
    def any_row(self) -> Row | None:
        """A row of the summary that has what all of them share; None where there is none."""
        return next((row for node_comparison in self.node_comparisons for row in node_comparison[1:3] if row), None)

    @property
    def between(self) -> tuple[tuple[int, int], ...]:
        """Node counts between which the detectably faster one becomes the detectably slower one."""
        decided = [node_comparison for node_comparison in self.node_comparisons if node_comparison.verdict in _DECIDED]
        pairs = itertools.pairwise(decided)
        return tuple((one.nodes, other.nodes) for one, other in pairs if one.verdict != other.verdict)

    @property
    def found(self) -> CrossoverOutcome:
        """None is seen where the smallest and the largest node count that both were measured at tell the same engine
        to be faster and none between them tells another."""
        if self.between:
            return "between"
        compared = [node_comparison.verdict for node_comparison in self.node_comparisons if node_comparison.verdict]
        settled = len(compared) > 1 and compared[0] in _DECIDED and compared[-1] in _DECIDED
        return "none seen" if settled else "cannot be told"

    @property
    def sentence(self) -> str:
        """In words, e.g. "zero3 overtakes zero2 between 2 and 4 nodes"."""
        one, other = self.engines
        if self.found == "between":
            return "; ".join(self._change(*pair) for pair in self.between)
        if self.found == "cannot be told":
            few = any(node_comparison.verdict == TOO_FEW for node_comparison in self.node_comparisons)
            return f"whether {one} and {other} cross cannot be told{f': {TOO_FEW}' if few else ''}"
        compared = [node_comparison for node_comparison in self.node_comparisons if node_comparison.verdict]
        faster, slower = (one, other) if compared[0].verdict == "faster" else (other, one)
        return (
            f"no crossover seen: {faster} is faster than {slower} on {compared[0].nodes} to {compared[-1].nodes} nodes"
        )

    def _change(self, before: int, after: int) -> str:
        verdict = next(
            node_comparison.verdict for node_comparison in self.node_comparisons if node_comparison.nodes == after
        )
        one, other = self.engines if verdict == "faster" else self.engines[::-1]
        return f"{one} overtakes {other} between {before} and {after} nodes"


def find_crossovers(results: Results, pairs: Sequence[tuple[str, str]] = (("zero2", "zero3"),)) -> list[Crossover]:
    """Return what becomes of each pair of engines on every pair of curves that differ in the engine only."""
    pace, by_engine = paces(results), _group_by_engine(list_tracks(results))
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
        [
            _build_cells(crossover, node_comparison)
            for crossover in found
            for node_comparison in crossover.node_comparisons
        ],
        COLUMNS,
    )


def _compare_tracks(one: Track, other: Track, pace: Paces) -> Crossover:
    met = list(_compare_at_nodes(one, other, pace))
    decided = iter(_decide(one, other, met, pace))
    judged = tuple(
        node_comparison._replace(verdict=next(decided)) if node_comparison.comparison else node_comparison
        for node_comparison in met
    )
    names = (questions.describe_engine(one.spec, other.spec), questions.describe_engine(other.spec, one.spec))
    return Crossover(one.law, one.batch, (one.name, other.name), names, judged)


def _compare_at_nodes(one: Track, other: Track, pace: Paces) -> Iterator[NodeComparison]:
    for nodes in sorted({*one.by_nodes, *other.by_nodes}):
        ours, theirs = (_select_row(track.by_nodes, nodes, pace) for track in (one, other))
        before, after = (_list_paces(track, nodes, pace) for track in (one, other))
        yield NodeComparison(nodes, ours, theirs, compare_fastest(before, after) if before and after else None, None)


def _decide(one: Track, other: Track, met: Sequence[NodeComparison], pace: Paces) -> list[Verdict]:
    """Return the verdicts on all node counts together. Where the micro-batch was chosen from the same data, they rest
    on intervals that allow for the choice, each at the level that all together need (Bonferroni's inequality)."""
    compared = [node_comparison for node_comparison in met if node_comparison.comparison]
    if one.batch == "equal micro-batch":
        return verdicts([node_comparison.comparison for node_comparison in compared if node_comparison.comparison])
    level = 1 - (1 - LEVEL) / max(len(compared), 1)
    found = [
        compare_fastest(_list_paces(one, each.nodes, pace), _list_paces(other, each.nodes, pace), level)
        for each in compared
    ]
    return [judge_interval(each.interval) if each.decides and each.interval else TOO_FEW for each in found]


def _list_paces(track: Track, nodes: int, pace: Paces) -> list[Pace]:
    """Return the paces of all micro-batches of a track at a node count that have one, the fastest first."""
    ranking = ranked(track.by_nodes.get(nodes, ()), pace)
    return [found for row in ranking.rows if (found := pace(row))] if ranking else []


def _select_row(by_nodes: Mapping[int, Sequence[Row]], nodes: int, pace: Paces) -> Row | None:
    """Return the row that stands for a track at a node count: the fastest, or how its smallest micro-batch failed."""
    rows = by_nodes.get(nodes, ())
    ranking = ranked(rows, pace)
    return ranking.fastest if ranking else min(rows, key=lambda row: row["micro"], default=None)


def _group_by_engine(found: Sequence[Track]) -> dict[str, list[Track]]:
    groups: dict[str, list[Track]] = {}
    for track in found:
        groups.setdefault(track.any_row["engine"], []).append(track)
    return groups


def _build_cells(crossover: Crossover, node_comparison: NodeComparison) -> Row:
    sides = {"one": node_comparison.one or {}, "other": node_comparison.other or {}}
    return {
        **sides["other"],
        **sides["one"],
        "nodes": node_comparison.nodes,
        "law": crossover.law,
        "batch": crossover.batch,
        "found": crossover.found,
        "told": crossover.sentence,
        **dict(zip(sides, crossover.names, strict=True)),
        **{f"{side}_{name}": row.get(name) for side, row in sides.items() for name in _SIDE},
        **build_ratio_cells("ratio", node_comparison.comparison),
        **build_basis_cells(node_comparison.comparison),
        "verdict": node_comparison.verdict,
    }
