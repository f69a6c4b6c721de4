"""Scaling curves: speed-up, efficiency and serial fraction over node counts, at equal and at the best micro-batch.

A curve joins rows of the summary that differ only in nodes and batch. All rows have the same global batch (strong
scaling) or the same accumulation (weak scaling). A curve never mixes machines or environment classes (hashes of device
and software versions). The class depends on the number of devices per node but not on the number of nodes, so runs on
different numbers of equal nodes have the same class.

The table of curves has a row per node count, with the columns of the summary and these:

law                strong or weak.
batch              equal micro-batch, or the best micro-batch at each node count.
curve              name of the curve.
micros             micro-batches requested at this node count, including failed ones.
tied_micros        micro-batches that are not detectably slower than that of the row.
base_nodes         smallest measured node count (the base).
base_step_s        seconds per step at the base, with its own interval.
speedup            samples per second, divided by those at the base; the scaled speed-up for a weak curve.
efficiency         speed-up divided by nodes / base_nodes: 1 is ideal.
serial_fraction    serial fraction by Karp and Flatt; for strong curves only, and not at the base.
"""

from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Literal, NamedTuple

import pandas as pd

from analysis import questions
from analysis.questions import assign_environments, describe_series, drop_retried, may_be_same
from analysis.results import Results
from analysis.scaling import (
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
    paces,
    read_once,
    scaled,
)
from analysis.scaling.best import compare_fastest, ranked
from analysis.summary import Row
from analysis.table import group_by, list_rows
from bench.core.formatting import format_count
from bench.core.spec import Batch, RunSpec, canonical

Law = Literal["strong", "weak"]
"""Quantity that is equal at all node counts. Strong: the global batch. Weak: the micro-steps of each device per
optimizer step. At equal micro-batch this means equal work per device."""
BatchChoice = Literal["equal micro-batch", "best micro-batch"]
"""Micro-batch of a curve: the same at all node counts, or the fastest at each node count."""

LAWS: Mapping[Law, str] = {"strong": "global_batch", "weak": "accumulation"}
"""The column of the summary that is equal at all node counts, for each law."""

_CURVE = ("law", "batch", "curve")
_NUMBERS = add_interval_names("base_step_s", "speedup", "efficiency", "serial_fraction")
COLUMNS = (
    *_CURVE, *WHERE, *PLACE, *TIME, "micros", "tied_micros", "base_nodes", *_NUMBERS, *BASIS, "flags", "reason",
)  # fmt: skip


# ---------------------------------------- rows that a curve may join


class Track(NamedTuple):
    """Rows of the summary that form one scaling curve, grouped by node count. The smallest node count is first.

    A track at equal micro-batch has one row per node count. A track at the best micro-batch has a row for each measured
    micro-batch at each node count.
    """

    law: Law
    batch: BatchChoice
    spec: RunSpec  # spec of any of the rows
    by_nodes: Mapping[int, Sequence[Row]]

    @property
    def any_row(self) -> Row:
        return next(iter(self.by_nodes.values()))[0]

    @property
    def environment_id(self) -> str | None:
        """The environment class (hash of device and software versions). None if all rows failed before their
        environment was recorded."""
        known = (row["environment_id"] for rows in self.by_nodes.values() for row in rows)
        return next((name for name in known if name), None)

    @property
    def fixed_work(self) -> int:
        """The quantity that is equal at all node counts: the global batch for strong scaling, or the number of
        accumulated micro-steps per step for weak scaling."""
        return int(self.any_row[LAWS[self.law]])

    @property
    def micro(self) -> int | None:
        return int(self.any_row["micro"]) if self.batch == "equal micro-batch" else None

    @property
    def name(self) -> str:
        """Engine, micro-batch and work of the track, such as "zero2, micro 4, 256 samples per step". The work is the
        amount that is equal at all node counts: samples per step, samples per step and device, or micro-steps."""
        if self.law == "strong":
            work = f"{format_count(self.fixed_work, 'sample')} per step"
        elif self.micro is None:
            work = format_count(self.fixed_work, "micro-step")
        else:
            work = f"{format_count(self.micro * self.fixed_work, 'sample')} per step and device"
        micro = "best micro-batch" if self.micro is None else f"micro {self.micro}"
        return ", ".join([describe_series(self.any_row | {"accumulation": 1}), micro, work])


@read_once
def list_tracks(results: Results) -> tuple[Track, ...]:
    """Return every track of at least two node counts, in the order of the tracks' rows in the summary. A track is the
    set of rows that form one scaling curve.

    A track at the best micro-batch exists only if two conditions hold. At least one node count has several
    micro-batches, so there is a choice. At least one micro-batch was run at several node counts.
    """
    found = (_list_tracks_of_law(results, rows, law) for rows in list_families(results) for law in LAWS)
    return tuple(track for of_law in found for track in of_law)


def list_families(results: Results) -> list[list[Row]]:
    """Return the measured rows in groups. The rows of a group differ only in the number of nodes and in the batch, so
    they can be points of one scaling curve."""
    measured = drop_retried([row for row in list_rows(results.summary) if row["evidence"] == "measured"])
    specs = {row["config_id"]: results.specs[row["config_id"]] for row in measured}
    family_keys = {config_id: canonical(_drop_nodes_and_batch(spec)) for config_id, spec in specs.items()}

    def build_key(row: Row) -> tuple[str, str]:
        return row["machine"], family_keys[row["config_id"]]

    placed = assign_environments(measured, build_key)
    groups = group_by(placed, lambda pair: (*build_key(pair[0]), pair[1]))
    return [[row for row, _ in group] for group in groups.values()]


def differ_in_engine(one: Track, other: Track) -> bool:
    """Return True if the engine is the only difference between two tracks (rows of one scaling curve each). Options
    that both engines have must be equal, too (`analysis.questions.differ_in_engine`)."""
    same = (one.law, one.batch, one.fixed_work, one.micro, one.any_row["machine"])
    return (
        same == (other.law, other.batch, other.fixed_work, other.micro, other.any_row["machine"])
        and may_be_same(one.environment_id, other.environment_id)
        and questions.differ_in_engine(_drop_nodes_and_batch(one.spec), _drop_nodes_and_batch(other.spec))
    )


def _list_tracks_of_law(results: Results, rows: Sequence[Row], law: Law) -> Iterator[Track]:
    for fixed_work in group_by(rows, itemgetter(LAWS[law])).values():
        spec = results.specs[fixed_work[0]["config_id"]]
        equal = [_group_by_nodes(of_micro) for of_micro in group_by(fixed_work, itemgetter("micro")).values()]
        equal = [by_nodes for by_nodes in equal if len(by_nodes) > 1]
        yield from (Track(law, "equal micro-batch", spec, by_nodes) for by_nodes in equal)
        best = _group_by_nodes(fixed_work)
        if equal and any(len(tried) > 1 for tried in best.values()):
            yield Track(law, "best micro-batch", spec, best)


def _group_by_nodes(rows: Sequence[Row]) -> dict[int, list[Row]]:
    return group_by(sorted(rows, key=itemgetter("nodes")), lambda row: int(row["nodes"]))


def _drop_nodes_and_batch(spec: RunSpec) -> RunSpec:
    return spec.model_copy(update={"nodes": 1, "batch": Batch(micro=1)})


# ---------------------------------------- curves


class CurvePoint(NamedTuple):
    """One node count of a curve, compared with the curve's smallest measured node count (the base).

    If there is no measurement at this node count, the estimates are None and the row states the outcome. At the base
    itself, speed-up and efficiency are 1 by definition and have no interval.
    """

    row: Row
    speedup: IntervalEstimate | None  # samples per second, divided by those at the base
    efficiency: IntervalEstimate | None  # speed-up, divided by the ratio of node counts
    serial_fraction: IntervalEstimate | None  # by Karp and Flatt; only for a strong curve beyond its base
    micros: tuple[int, ...]  # requested micro-batches at this node count, including failed ones
    tied: tuple[Row, ...] = ()  # rows of other micro-batches that are not detectably slower, the fastest first

    @property
    def nodes(self) -> int:
        return int(self.row["nodes"])


class ScalingCurve(NamedTuple):
    """A scaling curve: points that differ only in nodes and batch, for at least two node counts, the smallest first."""

    law: Law
    batch: BatchChoice
    name: str  # name of the track; model and machine are in every row
    points: tuple[CurvePoint, ...]

    @property
    def base(self) -> CurvePoint | None:
        """The point of the curve at the smallest node count with a measurement; None if all points failed."""
        return next((point for point in self.points if point.speedup), None)


@read_once
def build_curves(results: Results) -> tuple[ScalingCurve, ...]:
    """Return every scaling curve of at least two node counts, in the order of the summary."""
    pace = paces(results)
    return tuple(_build_curve(track, pace) for track in list_tracks(results))


def karp_flatt(speedup: IntervalEstimate, nodes: float) -> IntervalEstimate:
    """Return the serial fraction (1/S - 1/p) / (1 - 1/p) that explains a speed-up S on p times the nodes.

    `speedup` is S, and `nodes` is p. Source: Karp & Flatt, Communications of the ACM 33, 1990. The fraction is negative
    if S > p. It decreases as S grows, so the ends of its interval follow exactly from those of S.
    """

    def fraction(times: float) -> float:
        return (1 / times - 1 / nodes) / (1 - 1 / nodes)

    ends = speedup.interval
    interval = ends and ends._replace(low=fraction(ends.high), high=fraction(ends.low))
    return IntervalEstimate(fraction(speedup.value), interval)


def build_curve_table(found: Sequence[ScalingCurve]) -> pd.DataFrame:
    """Return a table with a row per node count of each curve."""
    return build_frame([_build_point_cells(curve, point) for curve in found for point in curve.points], COLUMNS)


def _build_curve(track: Track, pace: Paces) -> ScalingCurve:
    # node count of the base, and seconds per sample of its micro-batches
    base: tuple[int, Sequence[Pace]] | None = None
    points = []
    for nodes, rows in track.by_nodes.items():
        ranking, micros = ranked(rows, pace), tuple(sorted({row["micro"] for row in rows}))
        if ranking is None:
            points.append(CurvePoint(min(rows, key=itemgetter("micro")), None, None, None, micros))
            continue
        known = [found for row in ranking.rows if (found := pace(row))]
        speedup, efficiency, serial = IntervalEstimate(1.0), IntervalEstimate(1.0), None
        if base:
            faster, more = compare_fastest(base[1], known), nodes / base[0]
            speedup, efficiency = scaled(faster), scaled(faster, 1 / more)
            serial = karp_flatt(speedup, more) if track.law == "strong" else None
        base = base or (nodes, known)
        points.append(CurvePoint(ranking.fastest, speedup, efficiency, serial, micros, ranking.ties))
    return ScalingCurve(track.law, track.batch, track.name, tuple(points))


def _build_point_cells(curve: ScalingCurve, point: CurvePoint) -> Row:
    base = curve.base.row if curve.base else {}
    return {
        **point.row, "law": curve.law, "batch": curve.batch, "curve": curve.name,
        "micros": " ".join(map(str, point.micros)), "tied_micros": " ".join(str(row["micro"]) for row in point.tied),
        "base_nodes": base.get("nodes"), **{f"base_{name}": base.get(name) for name in add_interval_names("step_s")},
        **build_interval_cells("speedup", point.speedup), **build_interval_cells("efficiency", point.efficiency),
        **build_interval_cells("serial_fraction", point.serial_fraction), **build_basis_cells(point.speedup),
    }  # fmt: skip
