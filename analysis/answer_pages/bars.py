"""Horizontal bars, one below the other: what a total is made of, from which to which value it may lie, and a limit."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis.answer_pages.rendering import WIDTH_IN
from analysis.plotting import COLOURS, INK, shorten_text, styled
from bench.formatting import format_interval, format_number

_BAR_IN, _MARGIN_IN = 0.42, 0.62
_THICK = 0.42
_LETTERS = 66
_HATCH = "/////"


class StackedBar(NamedTuple):
    """One bar. Its ends `low` and `high` are those of the total; `limit` is what there is room for, None if that is
    not known; `unknown` says why there is no bar, `words` what follows from its value."""

    label: str
    parts: Mapping[str, float]
    low: float
    high: float
    limit: float | None = None
    unknown: str = ""
    words: str = ""


class PartLook(NamedTuple):
    """How a part looks, in the figure and in its key."""

    name: str
    colour: str
    hatched: bool


def choose_looks(names: Iterable[str]) -> tuple[PartLook, ...]:
    """Return the looks of parts: every colour once plain, then hatched."""
    colours = len(COLOURS)
    return tuple(PartLook(one, COLOURS[at % colours], at // colours % 2 > 0) for at, one in enumerate(names))


@styled
def draw_bars(bars: Sequence[StackedBar], looks: Sequence[PartLook], unit: tuple[float, str], limit: str) -> Figure:
    """Return the figure of some bars; `unit` is its size and name, `limit` what the limit is called."""
    figure = Figure(figsize=(WIDTH_IN, _MARGIN_IN + _BAR_IN * len(bars)), layout="constrained")
    axes = figure.subplots()
    size, name = unit
    for place, bar in enumerate(bars):
        _draw_bar(axes, place, bar, looks, unit)
    limits = {bar.limit for bar in bars if bar.limit is not None}
    axes.set(ylim=(len(bars) - 0.4, -0.75), xlim=(0, _find_end(bars) / size), yticks=[], xlabel=name)
    axes.spines["left"].set_visible(False)
    axes.grid(axis="x")
    if limits:
        words = f"{limit}, {min(limits) / size:.3g} {name}" if len(limits) == 1 else limit
        end = min(limits) / size
        late = end > 0.6 * axes.get_xlim()[1]
        axes.annotate(
            words, (end, 1), (-3 if late else 3, 2), xycoords=("data", "axes fraction"), textcoords="offset points",
            ha="right" if late else "left", fontsize=7,
        )  # fmt: skip
    return figure


def _draw_bar(axes: Axes, place: int, bar: StackedBar, looks: Sequence[PartLook], unit: tuple[float, str]) -> None:
    size, name = unit
    value = "" if bar.unknown else ", ".join(filter(None, [f"{_format_value(bar, size)} {name}", bar.words]))
    label = f"{bar.label}: {bar.unknown}" if bar.unknown else bar.label
    axes.text(0, place - 0.3, shorten_text(label, _LETTERS - len(value)), va="bottom", fontsize=7.5)
    axes.text(1, place - 0.3, value, va="bottom", ha="right", fontsize=7.5, transform=axes.get_yaxis_transform())
    start = 0.0
    for look in looks:
        wide = bar.parts.get(look.name, 0.0) / size
        if wide:
            axes.barh(
                place, wide, _THICK, left=start, color=look.colour, hatch=_HATCH if look.hatched else None,
                edgecolor=INK, linewidth=0.3, gid=f"part-{place}-{look.name.replace(' ', '-')}",
            )  # fmt: skip
            start += wide
    if bar.high > bar.low:
        ends = [bar.low / size, bar.high / size]
        axes.plot(ends, [place, place], color=INK, marker="|", markersize=7, linewidth=1.4, gid=f"range-{place}")
    if bar.limit is not None:
        axes.plot([bar.limit / size] * 2, [place - 0.28, place + 0.28], color=INK, linewidth=1.6, gid=f"limit-{place}")


def _format_value(bar: StackedBar, size: float) -> str:
    """Return the bar's total with its interval, or its ends where it begins at the lower."""
    total = sum(bar.parts.values())
    if bar.low == bar.high:
        return format_number(total / size)
    ends = format_number(bar.low / size), format_number(bar.high / size)
    return "–".join(ends) if total == bar.low else format_interval(total / size, bar.low / size, bar.high / size)


def _find_end(bars: Sequence[StackedBar]) -> float:
    """Return where the axis ends: past every bar, and past its limit."""
    most = max((max(bar.high, sum(bar.parts.values())) for bar in bars), default=0.0)
    limits = [bar.limit for bar in bars if bar.limit is not None]
    return 1.05 * max([most, *limits]) or 1.0
