"""The page of `zeroscale predict`: memory by term against the device, time by part, then the exact values."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from markupsafe import Markup
from matplotlib.figure import Figure

from analysis.answer_pages.bars import PartLook, StackedBar, choose_looks, draw_bars
from analysis.answer_pages.degrees import MOST_CURVES, TechniqueDegrees, build_degrees, draw_degrees, list_degree_rows
from analysis.answer_pages.rendering import WIDTH_IN, choose_unit, find_distinct, list_facts, render_figure
from analysis.answer_pages.scatter import SignLook, build_sign_looks
from analysis.charts.lanes import Lane, build_lanes, compute_idle
from analysis.formats import load_template
from analysis.plotting import choose_marker_style, styled
from analysis.plotting.lanes import LANE_COLOURS, draw_lanes
from bench.formatting import format_count, format_interval
from bench.predict.memory import MemoryPrediction, format_gigabytes

if TYPE_CHECKING:
    from bench.cli.predict import PredictionAnswer
    from bench.sweep.planning.prediction import Prediction

MOST_BARS = 40
BESIDE = "beside tensors"
"""What a process takes beside tensors, at least: context, libraries, and what the allocator holds in pieces."""
TERMS = (
    "weights", "master weights", "optimizer moments", "gradients", "activations", "working memory", "thrown away",
    "buckets", "gathered layers", "logits and loss", BESIDE,
)  # fmt: skip
PARTS = (
    "forward", "backward", "optimizer", "all-reduce", "gather", "reduce-scatter", "data", "recomputation", "stragglers",
)  # fmt: skip
_BYTES = ((1e9, "GB"), (1e6, "MB"))
_SECONDS = ((0.1, "s"), (1e-3, "ms"))
_UNIT_SECONDS = {"s": 1.0, "ms": 1e-3}
_LANE_IN, _LANES_IN, _MOST_LANES = 0.26, 0.55, 24  # height of a lane, of what is below all, and lanes of that height


class BarFigure(NamedTuple):
    """A figure of the page with its key."""

    svg: Markup
    looks: tuple[PartLook, ...]


class LaneFigure(NamedTuple):
    """The figure of a step's passes with its key; `idle` is the part of their time in which a rank makes none."""

    svg: Markup
    looks: tuple[PartLook, ...]
    idle: float


class DegreeFigure(NamedTuple):
    """The figure of a technique against its degree, with its key and its table."""

    name: str
    svg: Markup
    looks: tuple[SignLook, ...]
    rows: tuple[tuple[str, ...], ...]
    omitted: int  # curves that are in the table alone


def render_prediction_page(found: "Sequence[Prediction]", answer: "PredictionAnswer") -> str:
    """Return the page as HTML; `answer` is what the verb says of one point, and how it was called."""
    points = [list_facts(one.point.composed.spec, one.point.composed.machine.name) for one in found]
    differing = find_distinct(points)
    alone = len(found) == 1
    labels = [""] if alone else [_build_label(*one, differing) for one in enumerate(points, start=1)]
    return load_template("analysis.answer_pages", "prediction.html.j2").render(
        title="Prediction" if alone else f"Predictions of {format_count(len(found), 'point')}",
        answer=answer,
        shared={name: text for name, text in points[0].items() if name not in differing} if points else {},
        memory=_draw_memory(build_memory_bars(found, labels)),
        time=_draw_time(build_time_bars(found, labels)),
        lanes=_draw_passes(found[0]) if alone else None,
        degrees=[_draw_technique(one) for one in build_degrees(found)],
        most=MOST_BARS,
        omitted=max(0, len(found) - MOST_BARS),
        phases=_build_phase_table(found[0].memory) if alone and found[0].memory else None,
        parts=_build_part_table(found[0]) if alone and found[0].time else [],
        differing=differing,
        sources={
            one.point.composed.machine.name: one.point.composed.machine.source or "its file names no source"
            for one in found
        },
        rows=[] if alone else [_build_row(one, point, differing) for one, point in zip(found, points, strict=True)],
    )


def build_memory_bars(found: "Sequence[Prediction]", labels: Sequence[str]) -> list[StackedBar]:
    """Return the bars of memory in bytes: of one point every phase and what a device must have, of several only the
    latter; none where no point's memory is known."""
    if not any(one.memory for one in found):
        return []
    bars = []
    for one, label in list(zip(found, labels, strict=True))[:MOST_BARS]:
        room = one.point.composed.machine.memory_bytes
        if one.memory is None:
            bars.append(StackedBar(label, {}, 0, 0, room, one.memory_unknown))
            continue
        if len(found) == 1:
            bars += [StackedBar(phase.name, phase.terms, phase.total, phase.total, room) for phase in one.memory.phases]
        bar = _build_device_bar(one.memory, "a device, in all" if len(found) == 1 else label, room)
        bars.append(bar._replace(words="" if room is None else one.describe_fit()))
    return bars


def build_time_bars(found: "Sequence[Prediction]", labels: Sequence[str]) -> list[StackedBar]:
    """Return the bars of a step in seconds, and of one point what is hidden behind it; none where no time is known."""
    if not any(one.time for one in found):
        return []
    bars = [
        StackedBar(label or "a step", one.time.parts, one.time.low_s, one.time.high_s)
        if one.time
        else StackedBar(label, {}, 0, 0, unknown=one.time_unknown)
        for one, label in list(zip(found, labels, strict=True))[:MOST_BARS]
    ]
    (time,) = [one.time for one in found] if len(found) == 1 else [None]
    if time and time.hidden_s:
        bars.append(
            StackedBar("communication hidden behind it", {"hidden": time.hidden_s}, time.hidden_s, time.hidden_s)
        )
    return bars


def _build_device_bar(needed: MemoryPrediction, label: str, room: int | None) -> StackedBar:
    """Return the bar of the phase that needs most, with what lies beside tensors at least."""
    low, high = needed.device
    most = max(needed.phases, key=lambda phase: phase.total)
    return StackedBar(label, most.terms | {BESIDE: low - most.total}, low, high, room)


def _draw_memory(bars: Sequence[StackedBar]) -> BarFigure | None:
    return _draw("memory", bars, TERMS, choose_unit(_list_ends(bars), _BYTES), "the device") if bars else None


def _draw_time(bars: Sequence[StackedBar]) -> BarFigure | None:
    _, name = choose_unit(_list_ends(bars), _SECONDS)
    return _draw("time", bars, (*PARTS, "hidden"), (_UNIT_SECONDS[name], name), "") if bars else None


def build_pass_lanes(one: "Prediction") -> list[Lane]:
    """Return what the ranks of a pipeline do when; nothing of a point that is none."""
    spec = one.point.composed.spec
    return build_lanes(one.list_passes(), spec.world_size // spec.parallel.pipeline)


def _draw_passes(one: "Prediction") -> LaneFigure | None:
    lanes = build_pass_lanes(one)
    if not lanes:
        return None
    idle = compute_idle(lanes)
    _, name = choose_unit([lane.spans[-1].end_s for lane in lanes], _SECONDS)
    figure = _draw_lane_figure(lanes, name)
    shown = {span.kind for lane in lanes for span in lane.spans}
    looks = tuple(PartLook(kind, colour, hatched=False) for kind, colour in LANE_COLOURS.items() if kind in shown)
    alt = f"Forward and backward of {format_count(len(lanes), 'place')} of the pipeline; idle {100 * idle:.3g} %"
    return LaneFigure(render_figure("lanes", figure, alt), looks, idle)


def _draw_technique(shown: TechniqueDegrees) -> DegreeFigure:
    drawn = shown.curves[:MOST_CURVES]
    styles = {curve.label: choose_marker_style(number) for number, curve in enumerate(drawn) if curve.label}
    alt = f"Memory, communication and MFU of {format_count(len(drawn), 'curve')} by ranks of {shown.name}"
    svg = render_figure(shown.name.replace(" ", "-"), draw_degrees(shown), alt)
    omitted = len(shown.curves) - len(drawn)
    return DegreeFigure(shown.name, svg, tuple(build_sign_looks(styles)), tuple(list_degree_rows(shown)), omitted)


@styled
def _draw_lane_figure(lanes: Sequence[Lane], unit: str) -> Figure:
    figure = Figure(figsize=(WIDTH_IN, _LANES_IN + min(len(lanes), _MOST_LANES) * _LANE_IN), layout="constrained")
    axes = figure.subplots()
    draw_lanes(axes, lanes, _UNIT_SECONDS[unit])
    axes.set_xlabel(f"{unit} from the begin of the step's passes")
    return figure


def _list_ends(bars: Sequence[StackedBar]) -> list[float]:
    return [bar.high for bar in bars]


def _draw(
    name: str, bars: Sequence[StackedBar], known: Iterable[str], unit: tuple[float, str], limit: str
) -> BarFigure:
    """Return a figure whose parts look the same on every page, and the key of those that it shows."""
    shown = {part for bar in bars for part, amount in bar.parts.items() if amount}
    looks = choose_looks(dict.fromkeys([*known, *sorted(shown)]))
    alt = "; ".join(f"{bar.label or name}: {format_interval(*_scale(bar, unit[0]))} {unit[1]}" for bar in bars)
    svg = render_figure(name, draw_bars(bars, looks, unit, limit), alt)
    return BarFigure(svg, tuple(look for look in looks if look.name in shown))


def _scale(bar: StackedBar, size: float) -> tuple[float, float, float]:
    return sum(bar.parts.values()) / size, bar.low / size, bar.high / size


def _build_phase_table(needed: MemoryPrediction) -> dict[str, Any]:
    """Return bytes by term and phase."""
    names = dict.fromkeys(name for phase in needed.phases for name, amount in phase.terms.items() if amount)
    rows = [(name, [phase.terms.get(name, 0) for phase in needed.phases]) for name in names]
    return {
        "phases": [phase.name for phase in needed.phases],
        "rows": [*rows, ("tensors in all", [phase.total for phase in needed.phases])],
        "beside": [
            ("between steps", (needed.resident, needed.resident)),
            ("context, libraries and NCCL", needed.base),
            ("what the allocator may hold in pieces", needed.reserve),
            ("a device, in all", needed.device),
        ],
    }


def _build_part_table(one: "Prediction") -> list[tuple[str, float, float | None]]:
    """Return seconds and the share of a step by part; what is hidden has no share."""
    if one.time is None:
        return []
    parts = [(name, seconds, seconds / one.time.step_s) for name, seconds in one.time.parts.items()]
    ends = [("a step", one.time.step_s), ("at best", one.time.low_s), ("at worst", one.time.high_s)]
    return [
        *parts,
        *((name, seconds, seconds / one.time.step_s) for name, seconds in ends),
        *([("communication hidden", one.time.hidden_s, None)] if one.time.hidden_s else []),
    ]


def _build_label(number: int, point: dict[str, str], differing: Sequence[str]) -> str:
    """Return the number of a point's row and what tells it apart; its global batch follows from the rest."""
    return " ".join([f"{number}:", ", ".join(point[name] for name in differing if name != "global batch")])


def _build_row(one: "Prediction", point: dict[str, str], differing: Sequence[str]) -> dict[str, Any]:
    """Return what is predicted of one point among several."""
    memory, time = one.memory, one.time
    low, high = memory.device if memory else (0, 0)
    ends = dict.fromkeys(map(format_gigabytes, (low, high)))
    return {
        "config_id": one.point.config_id,
        "point": [point[name] for name in differing],
        "memory": "–".join(ends) if memory else None,
        "fits": one.describe_fit(),
        "step": format_interval(time.step_s, time.low_s, time.high_s) if time else None,
        "tokens": format_interval(*(time.tokens / s for s in (time.step_s, time.high_s, time.low_s))) if time else None,
        "bound": time.bound if time else None,
        "unknown": one.memory_unknown or one.time_unknown,
    }
