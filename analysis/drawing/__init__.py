"""Building blocks of figures. A figure is a list of panels; matplotlib draws them one by one for the report's page, or
together for print.

Figures are built without pyplot, so they keep no global state and need no display.
"""

import math
import re
import textwrap
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Text
from matplotlib.textpath import text_to_path

from analysis.summary import Row, is_disturbed

INK = "#1b1b1d"
"""Colour of text, axes and grid. The report's page replaces it by its own text colour."""

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#7F7F7F")
"""The palette of Okabe and Ito, made for colour-blind readers. Its yellow is omitted because it is too faint on paper.
"""

MARKERS = "osD^vPX"
_OPTION_KEY = re.compile(r"\b[\w.]+=")
_FILLINGS = 4  # fillings of a marker: full or light, each with and without a dark outline
LINES: Any = ("-", (0, (4, 1.5)), (0, (1, 1)), (0, (6, 1.5, 1, 1.5)))

STYLE: Any = {
    "font.family": "DejaVu Sans",  # wider than the fonts of browsers, so texts that fit here also fit there
    "font.size": 8, "axes.titlesize": 8, "axes.titleweight": "bold", "axes.titlelocation": "left",
    "axes.labelsize": 8, "xtick.labelsize": 7, "ytick.labelsize": 7, "legend.fontsize": 7.5,
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": INK, "xtick.color": INK, "ytick.color": INK,
    "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.6,
    "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True,
    "grid.color": INK, "grid.alpha": 0.12, "grid.linewidth": 0.6,
    "xtick.major.size": 0, "ytick.major.size": 2.5, "ytick.major.width": 0.6,
    "lines.linewidth": 1.2, "lines.markersize": 4.5, "legend.frameon": False,
    "text.parse_math": False,  # a dollar in an option's value is a dollar
    "svg.fonttype": "none", "pdf.fonttype": 42, "figure.facecolor": "white", "savefig.facecolor": "white",
}  # fmt: skip
"""Settings of matplotlib. Text in SVG and PDF is stored as text, so that it can be searched and edited."""

styled = matplotlib.rc_context(STYLE)
"""Decorator for functions that draw or save a figure. It makes them independent of the caller's matplotlib settings."""

WIDTH_IN = 7.2  # text width of a two-column page
WHOLE, MOST = 20, 12
"""Limits on the panels of a printed figure. If a figure has at most `WHOLE` panels, all of them are drawn. If it has
more, only `MOST` of them are drawn."""

# Sizes in inches, measured in DejaVu Sans: letters of titles and notes, lines of text, and entries of a legend.
_LETTER_IN, _SMALL_IN, _TITLE_IN, _LINE_IN = 0.07, 0.047, 0.14, 0.115
_KEY_IN, _KEY_LINE_IN, _KEY_LETTER_IN = 0.5, 0.18, 0.063
# Largest and smallest font size of a reason, and the width of a letter in the largest size.
_REASON, _LEAST, _REASON_LETTER_IN = 6.0, 4.0, 0.06
# Names below an axis: most letters of one name, most letters of all names on one line, and most names.
_NAME, _NAMES, _MOST_NAMES = 34, 28, 20
_ASLANT_LETTER_IN = 0.047  # width that a letter takes in a name drawn at an angle
_ENGINES = (
    "ddp", "zero1", "zero2", "fsdp", "zero3", "zero0", "fsdp_hybrid", "pipeline", "interleaved", "modular", "lga",
    "fsdp_no_reshard",
)  # fmt: skip
"""Engines in the order in which colours are assigned. Engines that occur often come first, so that they have the same
colour in all figures."""
BUSY = "busy"
_ENDED = {"oom": "OOM", "host_oom": "host OOM"}


class Look(NamedTuple):
    """Colour and marker of an engine: `place` is an index into COLOURS and MARKERS.

    Series of the same engine have different numbers `variant`, which select line style, filling of the markers, and
    marker. A marker has four fillings. So variants 0 to 3 have the first marker, variants 4 to 7 the next marker, and
    so on.
    """

    place: int
    variant: int = 0

    @property
    def colour(self) -> str:
        return COLOURS[self.place % len(COLOURS)]

    @property
    def marker(self) -> str:
        turn, place = divmod(self.place, len(COLOURS))
        return MARKERS[(place + turn + self.variant // _FILLINGS) % len(MARKERS)]

    @property
    def line(self) -> dict[str, Any]:
        return {"color": self.colour, "linestyle": LINES[self.variant % len(LINES)]}

    def style_marks(self, *, hollow: bool = False) -> dict[str, Any]:
        """Return the style of markers without a connecting line, as keyword arguments of matplotlib's plot."""
        fill = "none" if hollow else (self.colour, 0.45) if self.variant % 2 else self.colour
        # Every second pair of variants has a dark outline. A hollow marker keeps its colour, since that is all it has.
        edge = INK if self.variant % 4 > 1 and not hollow else self.colour
        style = {"markerfacecolor": fill, "markeredgecolor": edge}
        return {"color": self.colour, "marker": self.marker, "linestyle": "none", **style}


class Key(NamedTuple):
    """An entry of a figure's legend: a filled rectangle if `patch` is set, otherwise a line or marker.

    On the page, a click on the entry hides the series with the same `label`.
    """

    label: str
    style: Mapping[str, Any]
    patch: bool = False

    def build_handle(self, label: str = "") -> Artist:
        return Patch(label=label, **self.style) if self.patch else Line2D([], [], label=label, **self.style)


class Space(NamedTuple):
    """Height of a panel's axes, and the margins around them, in inches."""

    height: float = 1.6
    left: float = 0.62
    right: float = 0.1
    below: float = 0.42


PLAIN = Space()


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One pair of axes of a figure, with its title.

    title   words of the title; a line may break between two of them
    draw    function that draws into empty axes, which already have their final size
    group   panels of the same group are printed in the same rows, so that neighbours can be compared
    space   height and margins of the axes
    weight  count of numbers in the panel; if there are too many panels to print, those with the fewest are omitted
    wide    whether the panel takes the whole width of a page
    narrow  height and margins of a wide panel on a phone; None if it does not fit there
    """

    title: Sequence[str]
    draw: Callable[[Axes], None]
    space: Space = PLAIN
    group: str = ""
    weight: int = 1
    wide: bool = False
    narrow: Space | None = None


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure: panels, entries of the legend, and a `note` that explains how to read it. A figure without panels is
    not shown."""

    panels: Sequence[Panel] = ()
    keys: Sequence[Key] = ()
    note: str = ""


class Marks(NamedTuple):
    """Data of a drawn element: the name of the series to which it belongs, and the tooltips of its points. Each tooltip
    is a row of the summary or a text."""

    series: str
    tips: Sequence[Row | str]


class Drawing(Figure):
    """A matplotlib figure that also holds the data of its drawn elements. Keys of `marks` are the elements' SVG group
    ids (gid)."""

    def __init__(self, width: float, height: float) -> None:
        super().__init__(figsize=(width, height))
        self.marks: dict[str, Marks] = {}


def mark(artist: Artist, series: str = "", tips: Sequence[Row | str] = ()) -> None:
    """Attach data to a drawn element, so that the report's page can hide the series of the element and show tooltips of
    the element's points."""
    figure = artist.get_figure(root=True)
    if isinstance(figure, Drawing):
        gid = f"m{len(figure.marks)}"
        artist.set_gid(gid)
        figure.marks[gid] = Marks(series, tips)


def choose_looks(engines: Iterable[str]) -> dict[str, Look]:
    """Return the look (colour and marker) of each engine of a page.

    An engine gets its usual colour, or a free colour if another engine of the page already has the usual colour. If no
    colour is free, it gets a free combination of colour and marker.
    """
    taken: dict[str, Look] = {}
    for engine in sorted(set(engines), key=lambda one: (_ENGINES.index(one) if one in _ENGINES else 99, one)):
        # crc32, since hash() of a text differs from process to process, and equal records must give equal files.
        usual = _ENGINES.index(engine) if engine in _ENGINES else zlib.crc32(engine.encode()) % len(COLOURS) ** 2
        looks = [Look(place) for place in (usual, *range(len(COLOURS) ** 2))]
        # First a colour that no other engine has, since colours are distinguished more easily than markers.
        used, pairs = {one.colour for one in taken.values()}, {(one.colour, one.marker) for one in taken.values()}
        free = (one for one in looks if one.colour not in used)
        other = (one for one in looks if (one.colour, one.marker) not in pairs)
        taken[engine] = next(free, None) or next(other, looks[0])
    return taken


def assign_looks(labels: Iterable[str], engines: Iterable[str]) -> dict[str, Look]:
    """Return the look (colour, marker and line style) of every series by its label. The first word of a label is the
    engine. `engines` lists all engines of the page."""
    looks, turns = choose_looks(engines), Counter[str]()
    found = {}
    for label in sorted(set(labels)):
        engine = label.split(" ")[0]
        found[label] = looks[engine]._replace(variant=turns[engine])
        turns[engine] += 1
    return found


def get_room_in(axes: Axes) -> float:
    """Return the width of the axes in inches."""
    return float(axes.bbox.width / axes.get_figure(root=True).dpi)  # type: ignore[union-attr]


def measure_text(text: str, size: float) -> float:
    """Return the width in inches of one line of text in this font size."""
    font = FontProperties(family=STYLE["font.family"], size=size)
    return float(text_to_path.get_text_width_height_descent(text, font, ismath=False)[0]) / 72


def count_letters(text: str, room_in: float, size: float) -> float:
    """Return how many letters of a text fit a width of `room_in` inches in the font size `size`, if all letters have
    the text's mean width."""
    return len(text) * room_in / measure_text(text, size)


def shorten_text(text: str, letters: float) -> str:
    """Return a text of at most `letters` letters; a cut is marked by an ellipsis."""
    return text if len(text) <= letters else f"{text[: max(int(letters) - 1, 1)]}…"


def shorten_names(names: Sequence[str], rooms: Sequence[float]) -> list[str]:
    """Return the names, shortened so that different names stay different as far as possible. `rooms` holds the largest
    allowed number of letters of each name.

    Names are cut at their end. If a cut name could also be the beginning of another name, all names omit the keys of
    their options: `ddp (0.1, 8)` for `ddp (lr=0.1, warmup_tokens=8)`. If a cut name is still ambiguous, it is cut in
    its middle instead.
    """
    cut = list(map(shorten_text, names, rooms))
    if all(_is_distinct(short, name, names) for short, name in zip(cut, names, strict=True)):
        return cut
    bare = [_OPTION_KEY.sub("", name) for name in names]
    whole = bare if len(set(bare)) == len(set(names)) else names
    shortened = []
    for name, room in zip(whole, rooms, strict=True):
        short, kept = shorten_text(name, room), max(int(room) - 1, 2)
        middle = f"{name[: kept - kept // 2]}…{name[-(kept // 2) :]}"
        shortened.append(short if _is_distinct(short, name, whole) else middle)
    return shortened


def _is_distinct(short: str, name: str, names: Sequence[str]) -> bool:
    """Return False if `short` is `name` cut at its end, and another of the `names` begins with the same letters."""
    return short == name or not any(other.startswith(short[:-1]) for other in names if other != name)


def format_reason(row: Row | None) -> str:
    """Return in one or two words why a configuration has no number, such as OOM or busy. A `row` of None is a
    configuration that was not run."""
    if row is None:
        return "not run"
    ended = str(row["outcome"])
    if ended == "ok":
        return BUSY if is_disturbed(row) else "rehearsed" if row["evidence"] == "rehearsed" else "unknown"
    return _ENDED.get(ended, ended.replace("_", " "))


def write_reason(axes: Axes, x: float, y: float, row: Row | None, room_in: float = math.inf) -> Text:
    """Draw the reason why a configuration has no number, in a font size that fits `room_in` inches."""
    text = format_reason(row)
    # The smallest font size is still readable in print. A reason too long even for that size overlaps its neighbours.
    size = min(_REASON, max(_LEAST, _REASON * room_in / (_REASON_LETTER_IN * len(text))))
    style: Any = {"alpha": 0.6} if row is None or text == BUSY else {"fontweight": "bold"}
    return axes.text(x, y, text, ha="center", va="center", fontsize=size, **style)


def measure_names(names: Sequence[str]) -> float:
    """Return the height in inches of labels below the x axis of a panel that is as narrow as a phone."""
    if len(names) > _MOST_NAMES:
        return 0.22
    return 0.25 + 0.03 * min(max(map(len, names)), _NAME) if _is_aslant(names) else 0.22


def draw_names(axes: Axes, places: Sequence[float], names: Sequence[str]) -> None:
    """Draw labels below the x axis, whose range must already be set. Labels that would overlap are drawn at an angle.
    If there are too many labels, none is drawn."""
    if len(names) > _MOST_NAMES:
        places, names = [], []
    if not names or not _is_aslant(names):
        axes.set_xticks(places, names)
        return
    # A label at an angle ends below its tick. It is cut where it would reach into the panel on the left.
    scale_in, low = get_room_in(axes) / (axes.get_xlim()[1] - axes.get_xlim()[0]), axes.get_xlim()[0]
    rooms = [min(_NAME, (PLAIN.left + scale_in * (place - low)) / _ASLANT_LETTER_IN) for place in places]
    axes.set_xticks(places, shorten_names(names, rooms))
    for text in axes.get_xticklabels():
        text.set(rotation=30, horizontalalignment="right", rotation_mode="anchor", fontsize=6.5)


def _is_aslant(names: Sequence[str]) -> bool:
    return len(set(names)) * max(map(len, names)) > _NAMES


def draw_beyond(axes: Axes, marker: str, points: Sequence[tuple[float, float]], colour: str) -> Line2D:
    """Draw arrows at the end of an axis for points that lie outside the range of the axis."""
    (arrows,) = axes.plot(
        *zip(*points, strict=True), marker=marker, color=colour, linestyle="none", markersize=4, clip_on=False, zorder=4
    )
    return arrows


@styled
def draw_panel(panel: Panel, width_in: float, space: Space) -> Drawing:
    """Return a drawing of one panel with this width. The title of the panel is not drawn."""
    # The extra 0.08 inches above the axes hold the upper half of the highest tick's label.
    height = 0.08 + space.height + space.below
    drawing = Drawing(width_in, height)
    axes = drawing.add_axes(
        (space.left / width_in, space.below / height, 1 - (space.left + space.right) / width_in, space.height / height)
    )
    for patch in (drawing.patch, axes.patch):
        patch.set_visible(False)  # the page has its own background, light or dark
    panel.draw(axes)
    return drawing


@styled
def compose(picture: Picture) -> Figure:
    """Return the whole figure for print: legend, panels and note. If there are too many panels for a page, some are
    omitted."""
    panels = _select_panels(picture.panels)
    lines = _break_lines(panels)
    columns = max((len(line) for line in lines), default=1)
    width = WIDTH_IN if columns > 1 or any(panel.wide for panel in panels) else 0.6 * WIDTH_IN
    heads = [[_wrap_title(panel, width if panel.wide else width / columns) for panel in line] for line in lines]
    depths = [max(map(len, titles)) * _TITLE_IN for titles in heads]
    bodies = [max(panel.space.height + panel.space.below for panel in line) + 0.16 for line in lines]
    omitted = len(picture.panels) - len(panels)
    more = f"{omitted} of {len(picture.panels)} panels are omitted: those with the fewest points of each model."
    note = textwrap.wrap(" ".join(filter(None, [picture.note, more * bool(omitted)])), int((width - 0.2) / _SMALL_IN))
    keys, across = _measure_keys(picture.keys, width)
    above, below = _KEY_LINE_IN * math.ceil(len(keys) / across) + 0.1, _LINE_IN * len(note) + 0.12
    height = above + sum(depths) + sum(bodies) + below
    figure = Figure(figsize=(width, height))
    top = height - above
    for line, titles, depth, body in zip(lines, heads, depths, bodies, strict=True):
        for column, (panel, title) in enumerate(zip(line, titles, strict=True)):
            across_in, space = (width if panel.wide else width / columns), panel.space
            left, bottom = column * across_in + space.left, top - depth - 0.06 - space.height
            wide = across_in - space.left - space.right
            axes = figure.add_axes((left / width, bottom / height, wide / width, space.height / height))
            panel.draw(axes)
            aside = space.left - 0.1 if panel.wide else min(0.35, space.left - 0.1)
            axes.set_title("\n".join(title), x=-aside / wide)
        top -= depth + body
    if keys:
        handles = [key.build_handle(key.label) for key in keys]
        figure.legend(handles=handles, loc="upper left", ncols=across, borderaxespad=0.2)
    if note:
        figure.text(0.1 / width, 0.06 / height, "\n".join(note), fontsize=6.5, alpha=0.75, va="bottom", gid="note")
    return figure


def _select_panels(panels: Sequence[Panel]) -> list[Panel]:
    """Return the panels that are printed, in their order.

    If there are more than `WHOLE` panels, `MOST` of them are printed: the same number from each group as far as
    possible, and within a group the panels with the greatest weight.
    """
    if len(panels) <= WHOLE:
        return list(panels)
    order = sorted(range(len(panels)), key=lambda place: -panels[place].weight)
    return [panels[place] for place in select_evenly([(place, panels[place].group) for place in order], MOST)]


def select_evenly(ranked: Iterable[tuple[int, Hashable]], most: int) -> list[int]:
    """Return at most `most` indices in ascending order, the same number from each group as far as possible.

    `ranked` lists pairs of index and group. Within a group, indices that `ranked` lists earlier are preferred.
    """
    turns: Counter[Hashable] = Counter()
    numbered = []
    for place, group in ranked:
        numbered.append((turns[group], place))
        turns[group] += 1
    return sorted(place for _, place in sorted(numbered)[:most])


def _break_lines(panels: Sequence[Panel]) -> list[list[Panel]]:
    """Return the rows of panels on a printed page. Each group begins a new row, and a wide panel has a row for
    itself."""
    # At most three panels side by side are readable in print. More than twelve panels are an overview, four in a row.
    fitting = {1: 1, 2: 2, 4: 2}.get(len(panels), 3 if len(panels) <= 12 else 4)
    columns = min(fitting, max(Counter(panel.group for panel in panels).values(), default=1))
    lines: list[list[Panel]] = []
    for (_, wide), some in groupby(panels, key=lambda panel: (panel.group, panel.wide)):
        members, step = list(some), 1 if wide else columns
        lines += [members[place : place + step] for place in range(0, len(members), step)]
    return lines


def _wrap_title(panel: Panel, width_in: float) -> list[str]:
    room = int((width_in - 0.3) / _LETTER_IN)
    lines: list[str] = []
    for word in (shorten_text(word, room) for word in panel.title):
        if lines and len(lines[-1]) + len(word) + 3 <= room:
            lines[-1] += f" · {word}"
        else:
            lines.append(word)
    return lines


def _measure_keys(keys: Sequence[Key], width: float) -> tuple[list[Key], int]:
    """Return the legend's entries with labels cut to fit, and the number of entries per line."""
    room = int((width - _KEY_IN) / _KEY_LETTER_IN)
    fitting = [key._replace(label=shorten_text(key.label, room)) for key in keys]
    # If the entries do not fit one line, every column gets the width of the widest entry.
    entries = [_KEY_IN + _KEY_LETTER_IN * len(key.label) for key in fitting]
    if not entries or sum(entries) <= width:
        return fitting, max(len(entries), 1)
    return fitting, max(1, int(width / max(entries)))
