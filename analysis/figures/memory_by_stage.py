"""Memory against ZeRO's arithmetic: by engine what was measured, and what formulas say beforehand."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis import plotting
from analysis.charts import groups
from analysis.charts.groups import QuestionGroup
from analysis.charts.looks import choose_colour
from analysis.formats import UNITS, find_unit_power
from analysis.plotting import panels
from analysis.plotting.panels import Panel
from analysis.questions import describe_series
from analysis.results import Results
from analysis.summary import Row
from bench import engines
from bench.errors import UserError
from bench.predict.memory import predict_memory
from bench.spec import Device, RunSpec

TITLE = "Memory by stage against ZeRO's arithmetic"
ALT = (
    "By engine, peak allocated bytes as measured and those between steps, beside the predicted peak and the bytes of "
    "weights, gradients and optimizer state that ZeRO's arithmetic gives; a panel per question. The tables hold the "
    "numbers."
)
PLACE = 4

_NOTE = (
    "Each question at the micro-batch with most numbers, the largest of those; of configurations that differ in an "
    "option the one with most memory. Measured: over steady steps, on the rank with most; between steps gradients may "
    "have gone, and a bucket may stay. Predictions are formulas and fitted to nothing."
)
_DIVIDED: Any = {"facecolor": "none", "edgecolor": plotting.INK, "alpha": 0.45, "hatch": "////", "linewidth": 0.6}
_PEAK: Any = {
    "color": plotting.COLOURS[4],
    "marker": "_",
    "markersize": 16,
    "markeredgewidth": 1.6,
    "linestyle": "none",
}
_RESTING: Any = plotting.choose_marker_style(0) | {"marker": "D", "markerfacecolor": "none"}
_LETTERS_PER_IN = 16  # of a label below the axis
_STRIP = -0.05  # of the height: where it says why there is no number


class ConfigurationBytes(NamedTuple):
    """Of one configuration, None where unknown."""

    measured: int | None
    resting: int | None  # measured, between steps
    peak: int | None  # predicted, of live tensors at the peak of a steady step
    states: int | None  # predicted, weights, gradients and AdamW's state, as Table 1 of ZeRO counts them


@plotting.styled
def figure(results: Results) -> Figure:
    """Draw the largest rank's memory, in the largest binary unit that it fills."""
    grid = panels.build_grid([_select_one_micro(group) for group in groups.group_by_question(results.summary)])
    known_bytes = [
        [_compute_bytes(row, results.specs, _find_device(row)) for row in panel.rows] for panel in grid.panels
    ]
    power = find_unit_power(_find_highest(known_bytes))
    for panel, panel_bytes in zip(grid.panels, known_bytes, strict=True):
        others = zip(grid.panels, known_bytes, strict=True)
        shared_scale = [there for other, there in others if other.question["model"] == panel.question["model"]]
        _draw_panel(panel, panel_bytes, 1024**power, _find_highest(shared_scale))
    if grid.panels:
        grid.panels[0].axes.set_ylabel(f"per rank, {UNITS[power]}")
    evidence = sorted({panel.question["evidence"] for panel in grid.panels})
    plotting.draw_legend(grid.figure, _build_legend_entries(" or ".join(evidence)), _NOTE, grid.omitted)
    return grid.figure


def _select_one_micro(group: QuestionGroup) -> QuestionGroup:
    """Return the rows of the micro-batch with most numbers, the largest of those."""
    numbers = Counter({row["micro"]: 0 for row in group.rows})
    numbers.update(row["micro"] for row in group.rows if row["peak_allocated_bytes"] is not None)
    micro = max(numbers, key=lambda micro: (numbers[micro], micro))
    rows = sorted((row | {"variant": ""} for row in group.rows if row["micro"] == micro), key=_build_sort_key)
    rows = list({describe_series(row): row for row in rows}.values())
    fixed_work = " · ".join(filter(None, [f"micro {micro}", group.question["held"]]))
    return QuestionGroup({**group.question, "held": fixed_work}, rows)


def _build_sort_key(row: Row) -> tuple[str, int]:
    return describe_series(row), row["peak_allocated_bytes"] or 0


def _compute_bytes(row: Row, specs: Mapping[str, RunSpec], device: Device) -> ConfigurationBytes:
    spec = specs[row["config_id"]]
    try:
        peak = predict_memory(spec, device).peak
    except (UserError, ValueError):  # a family, a shape or an option that this version does not know
        peak = None
    states = _predict_state_bytes(spec, row["parameters"])
    return ConfigurationBytes(row["peak_allocated_bytes"], row["resident_bytes"], peak, states)


def _predict_state_bytes(spec: RunSpec, elements: int | None) -> int | None:
    facts = engines.find_facts(spec)
    if elements is None or facts is None or facts.division is None:
        return None
    return facts.division.state_bytes(elements, spec.precision)


def _find_device(row: Row) -> Device:
    """Only a device of its own has a caching allocator."""
    return "cuda" if row["peak_reserved_bytes"] is not None else "cpu"


def _find_highest(known_bytes: Iterable[Iterable[ConfigurationBytes]]) -> int:
    known = (value for panel in known_bytes for configuration in panel for value in configuration if value is not None)
    return max(known, default=0)


def _draw_panel(panel: Panel, known_bytes: Sequence[ConfigurationBytes], unit: int, highest: int) -> None:
    axes, labels = panel.axes, [describe_series(row) for row in panel.rows]
    for x, (measured, resting, peak, states) in enumerate(known_bytes):
        if states is not None:
            axes.bar(x, states / unit, width=0.6, zorder=1, **_DIVIDED)
        if peak is not None:
            axes.plot(x, peak / unit, zorder=3, **_PEAK)
        if resting is not None:
            axes.plot(x, resting / unit, zorder=2, **_RESTING)
        if measured is not None:
            axes.plot(x, measured / unit, zorder=4, **plotting.choose_marker_style(0))
    top = 1.08 * highest / unit or 1.0
    missing = [x for x, (measured, *_) in enumerate(known_bytes) if measured is None]
    for x in missing:
        room_in = panels.compute_room_in(axes) / len(labels)
        plotting.write_reason(axes, x, _STRIP * top, panel.rows[x], choose_colour(0), room_in)
    axes.set_ylim(2 * _STRIP * top if missing else 0, top)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= top])
    axes.axhline(0, color=plotting.INK, linewidth=0.6)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.set_xticks(range(len(labels)), labels, **_choose_label_style(labels, panels.compute_room_in(axes)))


def _choose_label_style(labels: Sequence[str], room_in: float) -> dict[str, Any]:
    """Return how labels are written so that they do not run into each other: small if need be, or aslant."""
    needed = len(labels) * max(map(len, labels))
    if needed <= room_in * _LETTERS_PER_IN:
        return {}
    aslant = {"rotation": 25, "ha": "right"} if needed > 1.2 * room_in * _LETTERS_PER_IN else {}
    return {"fontsize": 6, **aslant}


def _build_legend_entries(evidence: str) -> list[Artist]:
    return [
        Line2D([], [], label=f"{evidence}: peak allocated", **plotting.choose_marker_style(0)),
        Line2D([], [], label=f"{evidence}: between steps", **_RESTING),
        Line2D([], [], label="predicted: peak", **(_PEAK | {"markersize": 10})),
        Patch(label="predicted: weights, gradients, optimizer (ZeRO, Table 1)", **_DIVIDED),
    ]
