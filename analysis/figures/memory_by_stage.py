"""Memory against ZeRO's arithmetic: by engine what was measured, and what formulas say beforehand."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.artist import Artist
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from analysis import drawing
from analysis.drawing import panels
from analysis.drawing.panels import Group, Panel
from analysis.formats.numbers import UNITS, power_of
from analysis.questions import series
from analysis.results import Results
from analysis.summary import Row
from bench import engines
from bench.errors import UserError
from bench.predict.memory import memory
from bench.spec import Device, RunSpec

TITLE = "Memory by stage against ZeRO's arithmetic"
ALT = (
    "By engine, peak allocated bytes as measured, beside the predicted peak and the bytes of weights, gradients and "
    "optimizer state that ZeRO's arithmetic gives; a panel per question. The tables hold the numbers."
)
PLACE = 4

_NOTE = (
    "Each question at the micro-batch with most numbers, the largest of those; of configurations that differ in an "
    "option the one with most memory. Measured: over steady steps, on the rank with most. Predictions are formulas and "
    "fitted to nothing."
)
_DIVIDED: Any = {"facecolor": "none", "edgecolor": drawing.INK, "alpha": 0.45, "hatch": "////", "linewidth": 0.6}
_PEAK: Any = {"color": drawing.COLOURS[4], "marker": "_", "markersize": 16, "markeredgewidth": 1.6, "linestyle": "none"}
_LETTERS_PER_IN = 16  # of a label below the axis
_STRIP = -0.05  # of the height: where it says why there is no number


class Bytes(NamedTuple):
    """Of one configuration, None where unknown."""

    measured: int | None
    peak: int | None  # predicted, of live tensors at the peak of a steady step
    states: int | None  # predicted, weights, gradients and AdamW's state, as Table 1 of ZeRO counts them


@drawing.styled
def figure(results: Results) -> Figure:
    """Draw the largest rank's memory, in the largest binary unit that it fills."""
    grid = panels.grid([_at_one_micro(group) for group in panels.by_question(results.summary)])
    told = [[_bytes(row, results.specs, _device(row)) for row in panel.rows] for panel in grid.panels]
    power = power_of(_highest(told))
    for panel, here in zip(grid.panels, told, strict=True):
        others = zip(grid.panels, told, strict=True)
        alike = [there for other, there in others if other.question["model"] == panel.question["model"]]
        _draw(panel, here, 1024**power, _highest(alike))
    if grid.panels:
        grid.panels[0].axes.set_ylabel(f"per rank, {UNITS[power]}")
    evidence = sorted({panel.question["evidence"] for panel in grid.panels})
    drawing.legend(grid.figure, _keys(" or ".join(evidence)), _NOTE, grid.left_out)
    return grid.figure


def _at_one_micro(group: Group) -> Group:
    """Return the rows of the micro-batch with most numbers, the largest of those."""
    numbers = Counter({row["micro"]: 0 for row in group.rows})
    numbers.update(row["micro"] for row in group.rows if row["peak_allocated_bytes"] is not None)
    micro = max(numbers, key=lambda micro: (numbers[micro], micro))
    rows = sorted((row | {"variant": ""} for row in group.rows if row["micro"] == micro), key=_by_need)
    rows = list({series(row): row for row in rows}.values())
    held = " · ".join(filter(None, [f"micro {micro}", group.question["held"]]))
    return Group({**group.question, "held": held}, rows)


def _by_need(row: Row) -> tuple[str, int]:
    return series(row), row["peak_allocated_bytes"] or 0


def _bytes(row: Row, specs: Mapping[str, RunSpec], device: Device) -> Bytes:
    spec = specs[row["config_id"]]
    try:
        peak = memory(spec, device).peak
    except (UserError, ValueError):  # a family, a shape or an option that this version does not know
        peak = None
    return Bytes(row["peak_allocated_bytes"], peak, _states(spec, row["parameters"]))


def _states(spec: RunSpec, elements: int | None) -> int | None:
    facts = engines.known_facts(spec)
    if elements is None or facts is None or facts.division is None:
        return None
    return facts.division.state_bytes(elements, spec.precision)


def _device(row: Row) -> Device:
    """Only a device of its own has a caching allocator."""
    return "cuda" if row["peak_reserved_bytes"] is not None else "cpu"


def _highest(told: Iterable[Iterable[Bytes]]) -> int:
    known = (value for panel in told for configuration in panel for value in configuration if value is not None)
    return max(known, default=0)


def _draw(panel: Panel, told: Sequence[Bytes], unit: int, highest: int) -> None:
    axes, labels = panel.axes, [series(row) for row in panel.rows]
    for x, (measured, peak, states) in enumerate(told):
        if states is not None:
            axes.bar(x, states / unit, width=0.6, zorder=1, **_DIVIDED)
        if peak is not None:
            axes.plot(x, peak / unit, zorder=3, **_PEAK)
        if measured is not None:
            axes.plot(x, measured / unit, zorder=4, **drawing.point(0))
    top = 1.08 * highest / unit or 1.0
    missing = [x for x, (measured, *_) in enumerate(told) if measured is None]
    for x in missing:
        room_in = panels.room_in(axes) / len(labels)
        drawing.write_reason(axes, x, _STRIP * top, panel.rows[x], drawing.colour(0), room_in)
    axes.set_ylim(2 * _STRIP * top if missing else 0, top)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= top])
    axes.axhline(0, color=drawing.INK, linewidth=0.6)
    axes.set_xlim(-0.6, len(labels) - 0.4)
    axes.set_xticks(range(len(labels)), labels, **_fitting(labels, panels.room_in(axes)))


def _fitting(labels: Sequence[str], room_in: float) -> dict[str, Any]:
    """Return how labels are written so that they do not run into each other: small if need be, or aslant."""
    needed = len(labels) * max(map(len, labels))
    if needed <= room_in * _LETTERS_PER_IN:
        return {}
    aslant = {"rotation": 25, "ha": "right"} if needed > 1.2 * room_in * _LETTERS_PER_IN else {}
    return {"fontsize": 6, **aslant}


def _keys(evidence: str) -> list[Artist]:
    return [
        Line2D([], [], label=f"{evidence}: peak allocated", **drawing.point(0)),
        Line2D([], [], label="predicted: peak", **(_PEAK | {"markersize": 10})),
        Patch(label="predicted: weights, gradients, optimizer (ZeRO, Table 1)", **_DIVIDED),
    ]
