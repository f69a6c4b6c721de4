"""HTML pages of `zeroscale predict` and `zeroscale advise`, with figures in the style of the report."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from analysis.drawing import COLOURS, INK, Key, Panel, Picture, Space, choose_looks, get_room_in, mark, shorten_text
from analysis.drawing.lanes import KEYS, build_lanes, compute_idle, draw_lanes
from analysis.formats import load_template
from analysis.report.page import Tips, draw_folds, pack, render_figure
from bench.core.formatting import describe_choice, describe_lengths, format_count, format_interval, list_layout
from bench.core.formatting import format_number as number
from bench.predict.advice import find_front, rate_doubt
from bench.predict.memory import format_gigabytes

if TYPE_CHECKING:
    from bench.cli.advice_text import AdviceText
    from bench.cli.predict import PredictionAnswer
    from bench.core.spec import RunSpec
    from bench.predict.advice.choices import Choice
    from bench.sweep.advise.search import Answer
    from bench.sweep.prediction import Prediction

MOST_BARS, BEST = 40, 8
"""MOST_BARS is the maximum number of predicted configurations in a bar chart. BEST is the number of configurations that
the cost figure shows for each combination of engine and node count."""
BESIDE = "process and fragmentation"
"""Label of the part of a memory bar that is not tensors: the smallest amount that a process needs for its device
context, its libraries, and the allocator's fragmentation."""
_MOVED = ("all-reduce", "gather", "reduce-scatter")
_GB, _LOG = 1e9, 8  # _LOG: ratio of largest to smallest value above which an axis is logarithmic
_TIME_UNITS = (("days", 86400.0, 48.0), ("hours", 3600.0, 1.0), ("minutes", 60.0, 1 / 60), ("seconds", 1.0, 0.0))
"""Units of time: name, length in seconds, and the shortest duration in hours that is shown in this unit."""
_BAR_IN, _LETTERS_PER_IN = 0.42, 16.5


class StackedBar(NamedTuple):
    """A horizontal bar that stacks the parts of a total, in GB or in seconds.

    `low` and `high` are the best and the worst case of the total. `limit` is the memory of the device, if the bar has
    such a limit. `words` are printed after the total, or in place of a total that is unknown.
    """

    label: str
    parts: Mapping[str, float]
    low: float = 0.0
    high: float = 0.0
    limit: float | None = None
    words: str = ""


class Table(NamedTuple):
    """A table of the page. Columns from index `numbers` on are aligned as numbers. Rows whose last cell equals `marked`
    are highlighted."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numbers: int = 99
    marked: str = "the answer"


class Figure(NamedTuple):
    """A figure of the page. The title also serves as text description for screen readers."""

    name: str
    title: str
    picture: Picture


class Section(NamedTuple):
    """A section of the page. With `listed`, its lines are shown as a list."""

    name: str
    title: str
    lines: Sequence[str] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    listed: bool = False


class CostPoint(NamedTuple):
    """A configuration that `zeroscale advise` considers, with its (time, cost): expected (`at`), in the best case
    (`low`) and in the worst case (`high`)."""

    choice: "Choice"
    doubt: int  # doubt that the choice fits into memory and keeps the question's limits, 0 to 3; from `rate_doubt`
    at: tuple[float, float]
    low: tuple[float, float]
    high: tuple[float, float]


def render_prediction_page(found: "Sequence[Prediction]", answer: "PredictionAnswer") -> str:
    """Return the HTML page of predictions. `answer` holds the texts that `zeroscale predict` prints, and its command
    line."""
    points = [_list_facts(one.point.composed.spec, one.point.composed.machine.name) for one in found]
    differing = [name for name in points[0] if len({point[name] for point in points}) > 1]
    labels = [f"{place}: {', '.join(one[name] for name in differing)}" for place, one in enumerate(points, start=1)]
    machines = {one.point.composed.machine.name: one.point.composed.machine.source for one in found}
    sources = [f"{name}: {source or 'its machine file states no source'}" for name, source in machines.items()]
    time = [*_draw_bars("s", build_time_bars(found, labels)), *(_draw_passes(found[0]) if len(found) == 1 else ())]
    sections = [
        Section("memory", "Memory", answer.memory, _draw_bars("GB", build_memory_bars(found, labels))),
        Section("time", "Time", answer.time, time),
        Section("values", "Values", (), (), list(_list_tables(found, points, differing))),
        Section("sure", "How sure", [*answer.caveats, *sources], listed=True),
    ]
    title = "Prediction" if len(found) == 1 else f"Predictions of {format_count(len(found), 'point')}"
    shared = ", ".join(text for name, text in points[0].items() if name not in differing)
    return _render(title, [shared], sections, answer.command)


def render_advice_page(answer: "Answer", text: "AdviceText", command: str) -> str:
    """Return the HTML page of advice. `text` holds the sentences and tables of `zeroscale advise`; `command` is its
    command line."""
    points, (time, cost) = list_points(answer)
    winner = next(point for point in points if point.choice is answer.advice.winner)
    front = find_front((point for point in points if point.doubt <= winner.doubt), attrgetter("at"))
    shown = select_drawn(points, [*front, winner])
    cells = [_build_front_row(place, point, winner) for place, point in enumerate(front, start=1)]
    fronts = Table("The Pareto front", ("", "engine", "configuration", time, cost, "GB per device", ""), cells)
    tables = [("Each engine at its best", text.engines), ("Each number of nodes at its best", text.nodes)]
    tables.append(("Full training and each adapter at its best", text.adapters))
    rivals = [Table(title, (*rows[0], "compared with the answer"), rows[1:]) for title, rows in tables if rows]
    lines = [*filter(None, [text.next_on_front]), *(f"{name}: {value}" for name, value in text.facts)]
    sections = [
        Section("answer", "Answer", lines, listed=True),
        Section("costs", "Cost and time", (), [draw_costs(shown, front, winner, (time, cost))], [fronts]),
        Section("rivals", "Rivals", (), (), rivals),
        Section("rejected", "Excluded", (), (), [Table("", ("candidate", "reason"), text.rejected)]),
        Section("sure", "How sure", text.caveats, listed=True),
    ]
    return _render(text.winner, text.question, sections, command)


def _render(title: str, lead: Sequence[str], sections: Sequence[Section], command: str) -> str:
    known = [one for one in sections if one.lines or one.figures or any(table.rows for table in one.tables)]
    tips, figures = Tips(), [figure for section in known for figure in section.figures]
    drawn = {name: render_figure(name, words, words, picture, tips) for name, words, picture in figures}
    data = pack({"tips": list(tips.texts), "folds": draw_folds(drawn.values())})
    head = {"title": title, "lead": lead, "command": command, "data": data}
    return load_template("analysis.report", "answer.html.j2").render(sections=known, drawn=drawn, **head)


def build_memory_bars(found: "Sequence[Prediction]", labels: Sequence[str]) -> list[StackedBar]:
    """Return bars of memory in GB, for at most MOST_BARS predictions.

    A single prediction has a bar for each phase of the run, such as the forward pass or the update, and a bar for the
    whole device. If there are several predictions, each has only the bar for the whole device.
    """
    bars = []
    for one, label in list(zip(found, labels, strict=True))[:MOST_BARS]:
        room = one.point.composed.machine.memory_bytes
        limit = None if room is None else room / _GB
        if one.memory is None:
            bars.append(StackedBar(label, {}, limit=limit, words=one.memory_unknown))
            continue
        phases = [{name: size / _GB for name, size in phase.terms.items()} for phase in one.memory.phases]
        if len(found) == 1:
            named = zip((phase.name for phase in one.memory.phases), phases, strict=True)
            bars += [StackedBar(name, terms, sum(terms.values()), sum(terms.values()), limit) for name, terms in named]
        low, high = (size / _GB for size in one.memory.device)
        most = max(phases, key=lambda terms: sum(terms.values()))
        whole, words = most | {BESIDE: low - sum(most.values())}, "" if room is None else one.describe_fit()
        bars.append(StackedBar("whole device" if len(found) == 1 else label, whole, low, high, limit, words))
    return bars


def build_time_bars(found: "Sequence[Prediction]", labels: Sequence[str]) -> list[StackedBar]:
    """Return a bar of the step time in seconds for each prediction, at most MOST_BARS. If there is a single prediction,
    a second bar shows the communication that overlaps with computation."""
    bars = []
    for one, label in list(zip(found, labels, strict=True))[:MOST_BARS]:
        named, time = "a step" if len(found) == 1 else label, one.time
        if time is None:
            bars.append(StackedBar(named, {}, words=one.time_unknown))
            continue
        bars.append(StackedBar(named, time.parts, time.low_s, time.high_s))
        if len(found) == 1 and (hidden_s := time.hidden_s):
            bars.append(StackedBar("overlapped communication", {"overlapped": hidden_s}, hidden_s, hidden_s))
    return bars


def _draw_bars(unit: str, bars: Sequence[StackedBar]) -> list[Figure]:
    """Return a list that contains the figure of horizontal bars. The list is empty if all values are unknown."""
    keys = choose_keys(dict.fromkeys(part for bar in bars for part, amount in bar.parts.items() if amount))
    space = Space(_BAR_IN * len(bars) + 0.1, 0.12, 0.12)
    draw = partial(draw_bars, bars=bars, keys=keys, unit=unit)
    limit = " Thick line: memory of the device." if any(bar.limit is not None for bar in bars) else ""
    note = f"Thin line: from the best case to the worst.{limit}"
    picture = Picture([Panel(title=[], draw=draw, space=space, wide=True, narrow=space)], keys, note)
    titles = {"GB": "Memory of the rank that needs the most", "s": "Time of one step, without overlapped communication"}
    return [Figure(f"bars-{unit}", titles[unit], picture)] if keys else []


def choose_keys(names: Iterable[str]) -> list[Key]:
    """Return the colour and hatching of each part of the bars. Hatching is used only if there are more parts than
    colours."""
    looks = [(colour, hatch) for hatch in (None, "/////", "...") for colour in COLOURS]
    style: dict[str, Any] = {"edgecolor": INK, "linewidth": 0.3}
    pairs = zip(names, looks, strict=False)
    return [Key(name, style | {"facecolor": colour, "hatch": hatch}, patch=True) for name, (colour, hatch) in pairs]


def draw_bars(axes: Axes, bars: Sequence[StackedBar], keys: Sequence[Key], unit: str) -> None:
    """Draw horizontal bars, each with its label and value above it."""
    across, room = axes.get_yaxis_transform(), get_room_in(axes) * _LETTERS_PER_IN
    for y, bar in enumerate(bars):
        total = sum(bar.parts.values())
        ends = "–".join(dict.fromkeys((number(bar.low), number(bar.high))))
        known = f"{ends if total in (bar.low, bar.high) else format_interval(total, bar.low, bar.high)} {unit}"
        value = ", ".join(filter(None, [known * bool(bar.parts), bar.words]))
        label = shorten_text(bar.label, max(room - len(value) - 2, 12))
        style: dict[str, Any] = {"transform": across, "va": "bottom", "fontsize": 7}
        axes.text(0, y - 0.3, label, **style)
        axes.text(1, y - 0.3, shorten_text(value, room - len(label)), ha="right", **style)
        start = 0.0
        for key in keys:
            if wide := bar.parts.get(key.label, 0.0):
                (box,) = axes.barh(y, wide, 0.42, left=start, **key.style)
                mark(box, key.label)
                start += wide
        if bar.high > bar.low:
            axes.plot([bar.low, bar.high], [y, y], color=INK, marker="|", markersize=7, linewidth=1.4)
        if bar.limit is not None:
            axes.plot([bar.limit] * 2, [y - 0.28, y + 0.28], color=INK, linewidth=1.8)
    end = max([0.0, *(max(bar.high, sum(bar.parts.values()), bar.limit or 0.0) for bar in bars)])
    axes.set(ylim=(len(bars) - 0.5, -0.75), xlim=(0, 1.05 * end or 1.0), yticks=[], xlabel=unit)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=True, axis="x")


def _draw_passes(one: "Prediction") -> list[Figure]:
    spec = one.point.composed.spec
    lanes = build_lanes(one.list_passes(), spec.world_size // spec.parallel.pipeline)
    if not lanes:
        return []
    draw = partial(draw_lanes, lanes=lanes, size=1.0)
    panel = Panel(title=[], draw=draw, space=Space(0.2 * min(len(lanes), 24) + 0.1, 0.8), wide=True)
    idle = f"On average, a rank is idle for {100 * compute_idle(lanes):.3g} % of this time."
    note = (
        "Forward and backward passes of one step in seconds, simulated from the engine's schedule. The gradient "
        f"reductions and the update that follow are not shown. {idle}"
    )
    return [Figure("lanes", "Passes of each rank over time", Picture([panel], KEYS, note))]


def _list_tables(
    found: "Sequence[Prediction]", points: Sequence[dict[str, str]], differing: Sequence[str]
) -> Iterable[Table]:
    """Yield tables of exact values. A point is a predicted configuration. A single point gets a table of the bytes in
    each phase and a table of the parts of the step time. Several points get one table with a row per point."""
    if len(found) > 1:
        head = ("", "config", *differing, "fits", "bound by", *VALUES)
        rows = []
        for place, (one, point) in enumerate(zip(found, points, strict=True), start=1):
            fits = one.describe_fit() if one.memory else one.memory_unknown
            names = [str(place), one.point.config_id, *(point[name] for name in differing), fits]
            rows.append([*names, one.time.bound if one.time else one.time_unknown, *list_values(one)])
        yield Table("Points", head, rows, len(head) - len(VALUES))
    elif found[0].memory:
        phases = found[0].memory.phases
        terms = dict.fromkeys(name for phase in phases for name, amount in phase.terms.items() if amount)
        rows = [[name, *(f"{phase.terms.get(name, 0):,}" for phase in phases)] for name in terms]
        rows.append(["all tensors", *(f"{phase.total:,}" for phase in phases)])
        yield Table("Bytes per rank at the peak of each phase", ("", *(phase.name for phase in phases)), rows, 1)
    if len(found) == 1 and (time := found[0].time):
        parts = {**time.parts, "a step": time.step_s, "best case": time.low_s, "worst case": time.high_s}
        rows = [[name, f"{s:.6g}", f"{100 * s / time.step_s:.1f} %"] for name, s in parts.items()]
        yield Table("Parts of the step time", ("part", "s", "share of a step"), rows, 1)


VALUES = (
    "GB per device", "s of communication", "s waiting for communication", "s idle", "s per step", "tokens/s", "MFU, %",
)  # fmt: skip


def list_values(one: "Prediction") -> list[str]:
    """Return the predicted values of a point (a configuration) as texts, in the order of the headings VALUES. Unknown
    values are empty texts."""
    memory = "–".join(dict.fromkeys(number(size / _GB) for size in one.memory.device)) if one.memory else ""
    if (time := one.time) is None:
        return [memory, *[""] * (len(VALUES) - 1)]
    waited = sum(time.parts.get(name, 0.0) for name in _MOVED)
    seconds = (waited + time.hidden_s, waited, time.parts.get("idle", 0.0), time.step_s, time.tokens / time.step_s)
    return [memory, *map(number, seconds), "" if time.mfu is None else f"{100 * time.mfu:.1f}"]


def list_points(answer: "Answer") -> tuple[list[CostPoint], tuple[str, str]]:
    """Return every configuration that the advice considers, the cheapest first, and the units of time and cost.

    Time and cost are those of the whole training if its length is given, and otherwise those of a million tokens.
    """
    question, price, winner = answer.query.question, answer.query.price, answer.advice.winner
    hours = question.hours(winner, winner.estimate.step_s) if question.has_length else None
    time, seconds = next((unit, size) for unit, size, least_h in _TIME_UNITS if (hours or 0.0) >= least_h)
    cost, size = ("cost", 3600 / price) if price else ("node-hours", 3600.0 * winner.spec.devices_per_node)
    if hours is None:
        time, seconds = "s per million tokens", 1.0
        cost, size = ("cost of a million tokens", size) if price else ("device-seconds per million tokens", 1.0)
    points = []
    for choice in answer.choices:
        # hours of the training for each second of step time
        each = question.hours(choice, 1.0) if question.has_length else None
        steps = 1e6 / choice.time.tokens if each is None else 3600 * each
        if math.isfinite(steps):  # infinite if node failures leave no time to train
            scale, guess = (steps / seconds, steps * choice.spec.world_size / size), choice.estimate
            ends = [(scale[0] * s, scale[1] * s) for s in (guess.step_s, guess.low_s, guess.high_s)]
            points.append(CostPoint(choice, rate_doubt(choice, question), ends[0], ends[1], ends[2]))
    return sorted(points, key=lambda point: (point.at[1], point.at[0])), (time, cost)


def select_drawn(points: Sequence[CostPoint], kept: Sequence[CostPoint]) -> list[CostPoint]:
    """Return the points that the cost figure shows: all points of `kept`, and the BEST cheapest points of each
    combination of engine and node count. `points` is sorted by cost."""
    drawn, counts = [], Counter[tuple[str, int]]()
    for point in points:
        group = point.choice.spec.engine.name, point.choice.spec.nodes
        counts[group] += 1
        if counts[group] <= BEST or point in kept:
            drawn.append(point)
    return drawn


def draw_costs(
    points: Sequence[CostPoint], front: Sequence[CostPoint], winner: CostPoint, units: tuple[str, str]
) -> Figure:
    """Return the figure of cost against time, with a marker for each configuration of `points`.

    Colour and shape of a marker show the engine. A line joins the Pareto front (`front`), and a ring marks the
    recommended configuration (`winner`). `units` are the axis labels of time and cost.
    """
    looks = choose_looks(point.choice.spec.engine.name for point in points)

    def draw(axes: Axes) -> None:
        for name, look in looks.items():
            for doubtful in (False, True):
                own = [p for p in points if p.choice.spec.engine.name == name and (p.doubt > winner.doubt) == doubtful]
                if own:
                    style = look.style_marks(hollow=doubtful) | {"markersize": 4, "alpha": 0.6}
                    (marks,) = axes.plot(*zip(*(point.at for point in own), strict=True), **style)
                    mark(marks, name, [_describe_cost(point, units) for point in own])
        line: Any = {"color": INK, "linewidth": 1}
        axes.plot(*zip(*(point.at for point in front), strict=True), drawstyle="steps-post", gid="front", **line)
        for place, point in enumerate(front, start=1):
            axes.annotate(str(place), point.at, (-2, -3), textcoords="offset points", ha="right", va="top", fontsize=7)
        axes.plot(*zip(winner.low, winner.high, strict=True), marker="|", markersize=5, gid="range", **line)
        ring: Any = {"marker": "o", "markersize": 10, "markerfacecolor": "none", "linestyle": "none"}
        axes.plot([winner.at[0]], [winner.at[1]], gid="winner", **(line | ring))
        axes.set(xlabel=units[0], ylabel=units[1])
        axes.grid(axis="both")
        _scale_axes(axes, points)

    keys = [Key(name, look.style_marks()) for name, look in looks.items()]
    note = (
        f"Shown: the {BEST} cheapest configurations of each engine and node count, the Pareto front, and the answer. "
        "Hollow: less certain than the answer to fit into memory or to keep the limits. Numbered line: Pareto front, "
        "on which no other configuration is better in both time and cost. Ring: the answer, with a line from its best "
        "to its worst case. Of configurations that are equal within 5 %, the answer has the fewest nodes."
    )
    space = Space(3.0)
    panel = Panel(title=[], draw=draw, space=space, wide=True, narrow=space)
    return Figure("cost", "Time and cost of the configurations", Picture([panel], keys, note))


def _scale_axes(axes: Axes, points: Sequence[CostPoint]) -> None:
    """Make an axis logarithmic if its largest value is more than _LOG times its smallest. Tick labels are plain
    numbers."""
    for place, (axis, scale) in enumerate(((axes.xaxis, axes.set_xscale), (axes.yaxis, axes.set_yscale))):
        values = [point.at[place] for point in points]
        if max(values) > _LOG * min(values):
            scale("log")
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if max(values) < 100 * min(values) else (1,)))
            axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def _describe_cost(point: CostPoint, units: tuple[str, str]) -> str:
    (time, cost), spec = point.at, point.choice.spec
    return f"{spec.engine.name}, {describe_choice(spec)}\n{number(time)} {units[0]}\n{number(cost)} {units[1]}"


def _build_front_row(place: int, point: CostPoint, winner: CostPoint) -> list[str]:
    """Return the table cells of a configuration on the Pareto front. `place` is its number in the table."""
    intervals = [format_interval(*ends) for ends in zip(point.at, point.low, point.high, strict=True)]
    memory = "–".join(dict.fromkeys(map(format_gigabytes, point.choice.candidate.memory.device)))
    spec, note = point.choice.spec, "the answer" if point is winner else ""
    return [str(place), spec.engine.name, describe_choice(spec), *intervals, memory, note]


def _list_facts(spec: "RunSpec", machine: str) -> dict[str, str]:
    """Return the settings that identify a point (a configuration on a machine) as texts, by column name."""
    return {
        "model": spec.model.name, "engine": spec.engine.name, "precision": spec.precision,
        "ranks": f"{format_count(spec.nodes, 'node')} × {spec.devices_per_node}",
        "batch": f"micro {spec.batch.micro} × {spec.accumulation} = {spec.global_batch}",
        "checkpointing": f"{'' if spec.activation_checkpointing else 'no '}checkpointing",
        "layout": "  ".join(list_layout(spec)) or "data-parallel", "lengths": describe_lengths(spec),
        "objective": spec.objective, "data": spec.data.name, "machine": machine,
    }  # fmt: skip
