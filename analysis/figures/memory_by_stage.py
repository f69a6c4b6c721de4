"""Figure of memory by engine: measured, and predicted by formulas, including the formula for model states in the ZeRO
paper."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from analysis.drawing import (
    INK,
    Key,
    Look,
    Panel,
    Picture,
    Space,
    choose_looks,
    draw_names,
    get_room_in,
    groups,
    mark,
    measure_names,
    write_reason,
)
from analysis.drawing.groups import QuestionGroup
from analysis.formats import UNITS, find_unit_power, format_size
from analysis.questions import describe_series
from analysis.results import Results
from analysis.summary import Row
from bench import engines
from bench.core.errors import UserError
from bench.core.spec import Device, RunSpec
from bench.predict.memory import predict_memory

TITLE = "Memory by engine, measured and predicted"
ALT = "Measured and predicted memory of each engine at the peak and between steps, with a panel per question."
NEEDS = "runs of any kind"
PLACE = 4

_NOTE = (
    "Each panel shows the micro-batch at which most configurations were measured. If configurations of an engine "
    "differ in an option, the one with the most memory is shown. Measured: timed steps of the rank with the most "
    "memory. Between steps, an engine may have freed its gradients, or may keep a communication bucket. Predictions "
    "come from formulas that are not fitted to measurements. Model states: weights, gradients and optimizer state."
)
_DIVIDED: Any = {"facecolor": "none", "edgecolor": INK, "alpha": 0.45, "hatch": "////", "linewidth": 0.6}
_PEAK: Any = {"color": INK, "marker": "_", "markersize": 16, "markeredgewidth": 1.2, "linestyle": "none"}
_MEASURED: Any = {"color": INK, "marker": "o", "linestyle": "none"}  # in the legend; engines have their own looks
_RESTING: Any = _MEASURED | {"markerfacecolor": "none"}
_STRIP = -0.05  # place of the reasons for missing numbers, as a share of the height
_PREDICTED_PEAK = "predicted: peak allocated memory"
_PARTS = ("peak allocated memory", "memory between steps")
_STATES = "predicted: model states (ZeRO paper, Table 1)"


class ConfigurationBytes(NamedTuple):
    """Bytes of one configuration on the rank that uses most memory. A field is None if it is unknown."""

    measured: int | None  # at the peak
    resting: int | None  # measured between steps
    peak: int | None  # predicted: live tensors at the peak of a steady step
    states: int | None  # predicted: weights, gradients and AdamW's state, as Table 1 of the ZeRO paper counts them


def picture(results: Results) -> Picture:
    """Return a figure of memory on the rank that uses most, with one panel per question (configurations that do the
    same work on equal hardware). All panels of a model have the same binary unit, such as GiB. It is the largest unit
    in which the highest memory of these panels is at least 1."""
    ordered = groups.sort_groups([_select_one_micro(group) for group in groups.group_by_question(results.summary)])
    questions = [group.question for group in ordered]
    sizes = [[_compute_bytes(row, results.specs[row["config_id"]]) for row in group.rows] for group in ordered]
    names = {part: f"{' or '.join(sorted({one['evidence'] for one in questions}))}: {part}" for part in _PARTS}
    below = max((measure_names(groups.name_series(group.rows)) for group in ordered), default=0.3)
    looks, panels = choose_looks(results.table["engine"]), []
    for group, known in zip(ordered, sizes, strict=True):
        model = group.question["model"]
        alike = [other for question, other in zip(questions, sizes, strict=True) if question["model"] == model]
        # All panels of a model have the same y axis, so that heights can be compared.
        power = find_unit_power(_find_highest(alike))
        top = 1.08 * _find_highest(alike) / 1024**power or 1.0
        title = groups.describe_question(group.question, questions)
        draw = partial(_draw_panel, rows=group.rows, sizes=known, power=power, top=top, names=names, looks=looks)
        weight = sum(row["n"] > 0 for row in group.rows)
        panels.append(Panel(title=title, draw=draw, space=Space(below=below), group=model, weight=weight))
    measured = [Key(names[part], style) for part, style in zip(_PARTS, (_MEASURED, _RESTING), strict=True)]
    predicted = [Key(_PREDICTED_PEAK, _PEAK | {"markersize": 10}), Key(_STATES, _DIVIDED, patch=True)]
    return Picture(panels, [*measured, *predicted], _NOTE)


def _select_one_micro(group: QuestionGroup) -> QuestionGroup:
    """Return the rows of the micro-batch at which the largest number of configurations has measured memory. If there
    are several such micro-batches, return the rows of the largest."""
    # Micro-batches without any number are counted too, with 0, so that a question without numbers also gets a panel.
    numbers = Counter({row["micro"]: 0 for row in group.rows})
    numbers.update(row["micro"] for row in group.rows if row["peak_allocated_bytes"] is not None)
    micro = max(numbers, key=lambda micro: (numbers[micro], micro))
    rows = [row | {"variant": ""} for row in group.rows if row["micro"] == micro]
    rows.sort(key=lambda row: (describe_series(row), row["peak_allocated_bytes"] or 0))
    rows = list({describe_series(row): row for row in rows}.values())  # the last of a name has most memory
    fixed_work = " · ".join(filter(None, [f"micro {micro}", group.question["held"]]))
    return QuestionGroup({**group.question, "held": fixed_work}, rows)


def _compute_bytes(row: Row, spec: RunSpec) -> ConfigurationBytes:
    device: Device = "cpu" if row["peak_reserved_bytes"] is None else "cuda"  # only a GPU's allocator reserves memory
    try:
        peak = predict_memory(spec, device).peak
    except (UserError, ValueError):  # this version does not know the family, shape or option
        peak = None
    facts, elements, states = engines.find_facts(spec), row["parameters"], None
    trains_all = row.get("adapter", "none") == "none"  # Table 1 of ZeRO has no frozen weights
    if trains_all and elements is not None and facts is not None and facts.division is not None:
        states = facts.division.state_bytes(elements, spec.precision, spec.optimizer.name)
    return ConfigurationBytes(row["peak_allocated_bytes"], row["resident_bytes"], peak, states)


def _find_highest(known_bytes: Iterable[Iterable[ConfigurationBytes]]) -> int:
    return max((one or 0 for panel in known_bytes for configuration in panel for one in configuration), default=0)


def _draw_panel(
    axes: Axes,
    rows: Sequence[Row],
    sizes: Sequence[ConfigurationBytes],
    power: int,
    top: float,
    names: Mapping[str, str],
    looks: Mapping[str, Look],
) -> None:
    labels, unit = groups.name_series(rows), 1024**power
    for x, (row, size) in enumerate(zip(rows, sizes, strict=True)):
        look = looks[row["engine"]]
        for label, number, style, zorder in (
            (names[_PARTS[0]], size.measured, look.style_marks(), 4),
            (_PREDICTED_PEAK, size.peak, _PEAK, 3),
            (names[_PARTS[1]], size.resting, look.style_marks(hollow=True), 2),
        ):
            if number is not None:
                (point,) = axes.plot(x, number / unit, zorder=zorder, **style)
                words = f"{describe_series(row)}\n{label}: {format_size(number)}"
                mark(point, label, [row if number is size.measured else words])
        if size.states is not None:
            (bar,) = axes.bar(x, size.states / unit, width=0.6, zorder=1, **_DIVIDED)
            mark(bar, _STATES)
    missing = [x for x, size in enumerate(sizes) if size.measured is None]
    axes.set_xlim(-0.6, len(labels) - 0.4)
    for x in missing:
        mark(write_reason(axes, x, _STRIP * top, rows[x], get_room_in(axes) / len(labels)), "", [rows[x]])
    axes.set_ylim(2 * _STRIP * top if missing else 0, top)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= top])
    axes.axhline(0, color=INK, linewidth=0.6)
    axes.set_ylabel(f"memory per rank, {UNITS[power]}")
    draw_names(axes, range(len(labels)), labels)
