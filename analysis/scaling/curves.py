"""Speed-up, efficiency and serial fraction over node counts: strong and weak, at equal and at the best micro-batch.

The table of curves has a row per node count of each, with columns of the summary and these of its own:
law, batch, curve  what is held and at which micro-batch (`analysis.scaling.comparable`), and the curve's name
micros             micro-batches asked for at that node count, whatever became of them
tied_micros        those of them that repeats do not find slower than the one of the row
base_nodes         the smallest measured node count; its base_step_s in seconds, with the interval of its own
speedup            samples per second over the base's; of a weak curve the scaled speed-up
efficiency         speed-up over nodes / base_nodes: 1 is ideal
serial_fraction    Karp and Flatt's; of strong curves only, not at the base
The table of fits has a row per curve that the universal scalability law was fitted to, by measured_nodes:
rate_one_node      λ, samples per second; contention is σ, coherency κ (`analysis.scaling.usl`)
peak_nodes         beyond which more nodes hurt; missing where none is within reach
misfit             χ² per degree of freedom; missing where the errors of the points are unknown
rejected           the law does not hold: the points stray from it by more than repeats explain (p < 0.01)
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import pandas as pd

from analysis.results import Results
from analysis.scaling.cells import BASIS, PLACE, TIME, WHERE, basis, ends, frame, listed, with_ends
from analysis.scaling.comparable import BatchChoice, Law, Track, tracks
from analysis.scaling.once import once
from analysis.scaling.pace import Estimate, Pace, Paces, against, paces, scaled
from analysis.scaling.ranking import Ranking, ranked
from analysis.scaling.usl import Fit, fit
from analysis.summary import Row

_CURVE = ("law", "batch", "curve")
_NUMBERS = with_ends("base_step_s", "speedup", "efficiency", "serial_fraction")
_FIT = with_ends("rate_one_node", "contention", "coherency", "peak_nodes")
COLUMNS = (
    *_CURVE, *WHERE, *PLACE, *TIME, "micros", "tied_micros", "base_nodes", *_NUMBERS, *BASIS, "flags", "reason",
)  # fmt: skip
FIT_COLUMNS = (*_CURVE, *WHERE, "devices_per_node", "measured_nodes", *_FIT, *BASIS, "misfit", "rejected")


class Point(NamedTuple):
    """One node count of a curve: a row of the summary beside the base's. Numbers are None where there is none: the row
    then says how the runs ended. At the base itself speed-up and efficiency are 1 by definition, without an interval.
    """

    row: Row
    speedup: Estimate | None  # samples per second over the base's
    efficiency: Estimate | None  # speed-up over the nodes' ratio to the base's
    serial_fraction: Estimate | None  # Karp and Flatt's, of a strong curve beyond its base
    micros: tuple[int, ...]  # the micro-batches asked for at this node count, whatever became of them
    tied: tuple[Row, ...] = ()  # other micro-batches that repeats do not find slower, the fastest first

    @property
    def nodes(self) -> int:
        return int(self.row["nodes"])


class Curve(NamedTuple):
    """Node counts that differ in nothing else, the smallest first, at least two of them asked for."""

    law: Law
    batch: BatchChoice
    name: str  # engine and what is held, e.g. "zero2, micro 4, 256 samples per step"; model and machine: in any row
    points: tuple[Point, ...]
    fit: Fit | None  # the universal scalability law; None below five measured node counts

    @property
    def base(self) -> Point | None:
        """The smallest measured node count; its row states `step_s` with its own interval. None where all failed."""
        return next((point for point in self.points if point.speedup), None)


@once
def curves(results: Results) -> tuple[Curve, ...]:
    """Return every curve of at least two node counts, in the order of the summary."""
    pace = paces(results)
    return tuple(_curve(track, pace) for track in tracks(results))


def karp_flatt(speedup: Estimate, nodes: float) -> Estimate:
    """Return the serial fraction (1/S - 1/p) / (1 - 1/p) that explains a speed-up S on p times the nodes (Karp & Flatt,
    Communications of the ACM 33, 1990); below 0 where it is more than p. It falls with S, so its interval is exact."""

    def fraction(times: float) -> float:
        return (1 / times - 1 / nodes) / (1 - 1 / nodes)

    ends = speedup.interval
    interval = ends and ends._replace(low=fraction(ends.high), high=fraction(ends.low))
    return Estimate(fraction(speedup.value), interval)


def as_table(found: Sequence[Curve]) -> pd.DataFrame:
    """Return a row per node count of each curve."""
    return frame([_point_cells(curve, point) for curve in found for point in curve.points], COLUMNS)


def fit_table(found: Sequence[Curve]) -> pd.DataFrame:
    """Return a row per curve that the universal scalability law was fitted to."""
    return frame([_fit_cells(curve, curve.fit) for curve in found if curve.fit], FIT_COLUMNS)


def _curve(track: Track, pace: Paces) -> Curve:
    rankings = {nodes: ranked(rows, pace) for nodes, rows in track.by_nodes.items()}
    known = {nodes: told for nodes, ranking in rankings.items() if ranking and (told := pace(ranking.fastest))}
    points = [_point(track, nodes, ranking, known) for nodes, ranking in rankings.items()]
    return Curve(track.law, track.batch, track.name, tuple(points), fit(known))


def _point(track: Track, nodes: int, ranking: Ranking | None, known: Mapping[int, Pace]) -> Point:
    rows = track.by_nodes[nodes]
    micros = tuple(sorted({row["micro"] for row in rows}))
    if ranking is None:
        return Point(min(rows, key=lambda row: row["micro"]), None, None, None, micros)
    speedup, efficiency, serial = _numbers(track.law, nodes, known)
    return Point(ranking.fastest, speedup, efficiency, serial, micros, ranking.ties)


def _numbers(law: Law, nodes: int, known: Mapping[int, Pace]) -> tuple[Estimate, Estimate, Estimate | None]:
    base = min(known)
    if nodes == base:
        return Estimate(1.0), Estimate(1.0), None
    faster, more = against(known[base], known[nodes]), nodes / base
    speedup = scaled(faster)
    return speedup, scaled(faster, 1 / more), karp_flatt(speedup, more) if law == "strong" else None


def _point_cells(curve: Curve, point: Point) -> Row:
    base = curve.base.row if curve.base else {}
    return {
        **point.row, **_curve_cells(curve),
        "micros": listed(point.micros), "tied_micros": listed(row["micro"] for row in point.tied),
        "base_nodes": base.get("nodes"), **{f"base_{name}": base.get(name) for name in with_ends("step_s")},
        **ends("speedup", point.speedup), **ends("efficiency", point.efficiency),
        **ends("serial_fraction", point.serial_fraction), **basis(point.speedup),
    }  # fmt: skip


def _fit_cells(curve: Curve, fit: Fit) -> Row:
    return {
        **curve.points[0].row, **_curve_cells(curve), "measured_nodes": listed(fit.measured), "misfit": fit.misfit,
        "rejected": "yes" if fit.rejected else "no",
        **ends("rate_one_node", fit.rate), **ends("contention", fit.contention), **ends("coherency", fit.coherency),
        **ends("peak_nodes", fit.peak), **basis(fit.rate),
    }  # fmt: skip


def _curve_cells(curve: Curve) -> Row:
    return {"law": curve.law, "batch": curve.batch, "curve": curve.name}
