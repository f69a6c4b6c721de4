"""Speed-up, efficiency and serial fraction over node counts: strong and weak, at equal and at the best micro-batch.

The table of curves has a row per node count of each, with columns of the summary and these of its own:
law, batch, curve  what is held and at which micro-batch (`analysis.scaling.comparable`), and the curve's name
micros             micro-batches asked for at that node count, whatever became of them
tied_micros        those of them that repeats do not find slower than the one of the row
base_nodes         the smallest measured node count; its base_step_s in seconds, with the interval of its own
speedup            samples per second over the base's; of a weak curve the scaled speed-up
efficiency         speed-up over nodes / base_nodes: 1 is ideal
serial_fraction    Karp and Flatt's; of strong curves only, not at the base
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from analysis.results import Results
from analysis.scaling.best import Ranking, compare_fastest, ranked
from analysis.scaling.comparable import BatchChoice, Law, Track, list_tracks
from analysis.scaling.time_per_sample import (
    BASIS,
    PLACE,
    TIME,
    WHERE,
    IntervalEstimate,
    Pace,
    Paces,
    add_interval_names,
    build_basis_cells,
    build_frame,
    build_interval_cells,
    join_numbers,
    paces,
    read_once,
    scaled,
)
from analysis.summary import Row

_CURVE = ("law", "batch", "curve")
_NUMBERS = add_interval_names("base_step_s", "speedup", "efficiency", "serial_fraction")
COLUMNS = (
    *_CURVE, *WHERE, *PLACE, *TIME, "micros", "tied_micros", "base_nodes", *_NUMBERS, *BASIS, "flags", "reason",
)  # fmt: skip


class CurvePoint(NamedTuple):
    """One node count of a curve: a row of the summary beside the base's. Numbers are None where there is none: the row
    then says how the runs ended. At the base itself speed-up and efficiency are 1 by definition, without an interval.
    """

    row: Row
    speedup: IntervalEstimate | None  # samples per second over the base's
    efficiency: IntervalEstimate | None  # speed-up over the nodes' ratio to the base's
    serial_fraction: IntervalEstimate | None  # Karp and Flatt's, of a strong curve beyond its base
    micros: tuple[int, ...]  # the micro-batches asked for at this node count, whatever became of them
    tied: tuple[Row, ...] = ()  # other micro-batches that repeats do not find slower, the fastest first

    @property
    def nodes(self) -> int:
        return int(self.row["nodes"])


class ScalingCurve(NamedTuple):
    """Node counts that differ in nothing else, the smallest first, at least two of them asked for."""

    law: Law
    batch: BatchChoice
    name: str  # engine and what is held, e.g. "zero2, micro 4, 256 samples per step"; model and machine: in any row
    points: tuple[CurvePoint, ...]

    @property
    def base(self) -> CurvePoint | None:
        """The smallest measured node count; its row states `step_s` with its own interval. None where all failed."""
        return next((point for point in self.points if point.speedup), None)


@read_once
def build_curves(results: Results) -> tuple[ScalingCurve, ...]:
    """Return every curve of at least two node counts, in the order of the summary."""
    pace = paces(results)
    return tuple(_build_curve(track, pace) for track in list_tracks(results))


def karp_flatt(speedup: IntervalEstimate, nodes: float) -> IntervalEstimate:
    """Return the serial fraction (1/S - 1/p) / (1 - 1/p) that explains a speed-up S on p times the nodes (Karp & Flatt,
    Communications of the ACM 33, 1990); below 0 where it is more than p. It falls with S, so its interval is exact."""

    def fraction(times: float) -> float:
        return (1 / times - 1 / nodes) / (1 - 1 / nodes)

    ends = speedup.interval
    interval = ends and ends._replace(low=fraction(ends.high), high=fraction(ends.low))
    return IntervalEstimate(fraction(speedup.value), interval)


def build_curve_table(found: Sequence[ScalingCurve]) -> pd.DataFrame:
    """Return a row per node count of each curve."""
    return build_frame([_build_point_cells(curve, point) for curve in found for point in curve.points], COLUMNS)


def _build_curve(track: Track, pace: Paces) -> ScalingCurve:
    rankings = {nodes: ranked(rows, pace) for nodes, rows in track.by_nodes.items()}
    known = {
        nodes: [found for row in ranking.rows if (found := pace(row))] for nodes, ranking in rankings.items() if ranking
    }
    points = [_build_curve_point(track, nodes, ranking, known) for nodes, ranking in rankings.items()]
    return ScalingCurve(track.law, track.batch, track.name, tuple(points))


def _build_curve_point(
    track: Track, nodes: int, ranking: Ranking | None, known: Mapping[int, Sequence[Pace]]
) -> CurvePoint:
    rows = track.by_nodes[nodes]
    micros = tuple(sorted({row["micro"] for row in rows}))
    if ranking is None:
        return CurvePoint(min(rows, key=lambda row: row["micro"]), None, None, None, micros)
    speedup, efficiency, serial = _compute_scaling(track.law, nodes, known)
    return CurvePoint(ranking.fastest, speedup, efficiency, serial, micros, ranking.ties)


def _compute_scaling(
    law: Law, nodes: int, known: Mapping[int, Sequence[Pace]]
) -> tuple[IntervalEstimate, IntervalEstimate, IntervalEstimate | None]:
    base = min(known)
    if nodes == base:
        return IntervalEstimate(1.0), IntervalEstimate(1.0), None
    faster, more = compare_fastest(known[base], known[nodes]), nodes / base
    speedup = scaled(faster)
    return speedup, scaled(faster, 1 / more), karp_flatt(speedup, more) if law == "strong" else None


def _build_point_cells(curve: ScalingCurve, point: CurvePoint) -> Row:
    base = curve.base.row if curve.base else {}
    return {
        **point.row, "law": curve.law, "batch": curve.batch, "curve": curve.name,
        "micros": join_numbers(point.micros), "tied_micros": join_numbers(row["micro"] for row in point.tied),
        "base_nodes": base.get("nodes"), **{f"base_{name}": base.get(name) for name in add_interval_names("step_s")},
        **build_interval_cells("speedup", point.speedup), **build_interval_cells("efficiency", point.efficiency),
        **build_interval_cells("serial_fraction", point.serial_fraction), **build_basis_cells(point.speedup),
    }  # fmt: skip
