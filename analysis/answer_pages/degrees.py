"""What several predicted points say of each technique against its degree: memory, time of communication, efficiency."""

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.answer_pages.rendering import WIDTH_IN, find_distinct, list_facts
from analysis.plotting import INK, choose_marker_style, styled
from bench.formatting import format_number

if TYPE_CHECKING:
    from bench.sweep.prediction import Prediction

TECHNIQUES = {"tensor": "tensor parallelism", "pipeline": "pipeline", "copies": "data parallelism"}
"""What has a degree: ranks that share each matrix, ranks that the layers are divided among, data-parallel ranks, which
ZeRO and FSDP divide states among."""
MOST_CURVES = 7
_HEIGHT_IN = 5.2
_GB = 1e9


class DegreePoint(NamedTuple):
    """One point of a curve."""

    degree: int
    memory_bytes: tuple[int, int]  # of a device, low and high
    communication_s: float  # of a step, what computing hides included
    exposed_s: float  # of it, what the step waits for
    idle_s: float  # in which a rank waits for other stages
    step_s: float
    mfu: float | None


class DegreeCurve(NamedTuple):
    """Points that differ in the degree of one technique, and in what follows from it."""

    label: str  # what sets it apart from the technique's other curves
    points: tuple[DegreePoint, ...]


class TechniqueDegrees(NamedTuple):
    """A technique against its degree."""

    name: str
    curves: tuple[DegreeCurve, ...]
    room_bytes: int | None  # of a device, where all points have the same


def build_degrees(found: "Sequence[Prediction]") -> list[TechniqueDegrees]:
    """Return each technique of which points differ in the degree; a point whose memory or time is unknown is left
    out."""
    known = [one for one in found if one.memory and one.time]
    facts = [_list_degree_facts(one) for one in known]
    rooms = {one.point.composed.machine.memory_bytes for one in known}
    room = rooms.pop() if len(rooms) == 1 else None
    techniques = []
    for technique in TECHNIQUES:
        groups = _group_by_others(facts, technique)
        shared = [{name: facts[group[0]][name] for name in left} for group, left in groups.items()]
        differing = find_distinct([{name: one.get(name, "") for name in facts[0]} for one in shared])
        curves = [
            DegreeCurve(
                ", ".join(one[name] for name in differing if name in one),
                tuple(sorted(_build_degree_point(known[place], technique) for place in group)),
            )
            for group, one in zip(groups, shared, strict=True)
        ]
        if curves:
            techniques.append(TechniqueDegrees(TECHNIQUES[technique], tuple(curves), room))
    return techniques


def _list_degree_facts(one: "Prediction") -> dict[str, str]:
    """Return what tells points apart, each degree by itself."""
    spec = one.point.composed.spec
    facts = list_facts(spec, one.point.composed.machine.name)
    del facts["layout"]
    degrees = {name: f"{name} {_get_degree(one, name)}" for name in TECHNIQUES}
    stages = {"stages": f"stages {spec.parallel.stages_per_rank}", "sequence": f"sequence {spec.parallel.sequence}"}
    return facts | degrees | stages | {"micro": f"micro {spec.batch.micro}"}


def _get_degree(one: "Prediction", technique: str) -> int:
    spec = one.point.composed.spec
    return {"tensor": spec.parallel.tensor, "pipeline": spec.parallel.pipeline, "copies": spec.data_parallel}[technique]


def _group_by_others(facts: Sequence[dict[str, str]], technique: str) -> dict[tuple[int, ...], tuple[str, ...]]:
    """Return the points of each curve, and in which facts they are alike. The number of ranks stays as it is, but for
    data parallelism, and either the samples of a step or those of each rank."""
    groups: dict[tuple[int, ...], tuple[str, ...]] = {}
    for batch in ("batch", "global batch"):
        following = {technique, batch, "ranks" if technique == "copies" else "copies"}
        alike: dict[tuple[str, ...], list[int]] = {}
        for place, one in enumerate(facts):
            alike.setdefault(tuple(text for name, text in one.items() if name not in following), []).append(place)
        left = tuple(name for name in (facts[0] if facts else ()) if name not in following)
        for places in alike.values():
            if len({facts[place][technique] for place in places}) == len(places) > 1:
                groups.setdefault(tuple(places), left)
    return groups


def _build_degree_point(one: "Prediction", technique: str) -> DegreePoint:
    memory, time = one.memory, one.time
    assert memory and time
    exposed, idle = time.exposed_s, time.parts.get("idle", 0.0)
    whole = exposed + time.hidden_s
    return DegreePoint(_get_degree(one, technique), memory.device, whole, exposed, idle, time.step_s, time.mfu)


@styled
def draw_degrees(shown: TechniqueDegrees) -> Figure:
    """Return the figure: below each other memory of a device, seconds of communication, and what share of the peak the
    model's FLOPs are, each against the degree; the first curves alone where there are many."""
    figure = Figure(figsize=(WIDTH_IN, _HEIGHT_IN), layout="constrained")
    memory, communication, efficiency = figure.subplots(3, sharex=True)
    for number, curve in enumerate(shown.curves[:MOST_CURVES]):
        style, degrees = choose_marker_style(number) | {"markersize": 4, "linestyle": "-"}, _list_degrees([curve])
        lows, highs = zip(*(point.memory_bytes for point in curve.points), strict=True)
        memory.plot(degrees, [low / _GB for low in lows], **style, gid=f"memory-{number}")
        memory.vlines(degrees, [low / _GB for low in lows], [high / _GB for high in highs], style["color"])
        communication.plot(
            degrees, [point.communication_s for point in curve.points], **style, gid=f"communication-{number}"
        )
        rates = [(point.degree, 100 * point.mfu) for point in curve.points if point.mfu is not None]
        if rates:
            efficiency.plot(*zip(*rates, strict=True), **style, gid=f"efficiency-{number}")
    if shown.room_bytes is not None:
        memory.axhline(shown.room_bytes / _GB, color=INK, linestyle="--", linewidth=1, gid="room")
    memory.set_ylabel("GB of a device")
    communication.set_ylabel("s of communication")
    efficiency.set(ylabel="MFU, %", xlabel=f"ranks of {shown.name}")
    _scale_by_doubling(efficiency, _list_degrees(shown.curves))
    for axes in (memory, communication, efficiency):
        axes.set_ylim(bottom=0)
    return figure


def _scale_by_doubling(axes: Axes, degrees: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(degrees, list(map(str, degrees)))


def _list_degrees(curves: Iterable[DegreeCurve]) -> list[int]:
    return sorted({point.degree for curve in curves for point in curve.points})


def list_degree_rows(shown: TechniqueDegrees) -> Iterator[tuple[str, ...]]:
    """Yield the cells of a row for each point, curve by curve."""
    for curve in shown.curves:
        for point in curve.points:
            ends = dict.fromkeys(format_number(size / _GB) for size in point.memory_bytes)
            seconds = point.communication_s, point.exposed_s, point.idle_s, point.step_s
            mfu = "–" if point.mfu is None else f"{100 * point.mfu:.1f}"
            yield curve.label, str(point.degree), "–".join(ends), *map(format_number, seconds), mfu
