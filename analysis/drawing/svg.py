"""Figures as files, and as SVG elements of a page. The elements use the page's font and colours and carry attributes
for its script."""

import functools
import html
import io
import re
import zlib
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from analysis.drawing import COLOURS, INK, STYLE, Drawing, Key, Panel, draw_panel
from analysis.summary import Row

FORMATS = ("pdf", "png", "svg")
PANEL_IN, HALF_IN, WIDE_IN = 3.6, 5.4, 9.6
"""Width of a panel in inches: on a phone, on half a page, and on a whole page."""

_PNG_DPI = 200
_KEY, _KEY_IN = "key", (0.34, 0.16)
_SPARE = re.compile("<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", re.DOTALL)
_EMPTY = re.compile("<g[^>]*/>|<g> *</g>|(?<=>) (?=<)")
_GROUP = re.compile("<g>|<g [^>]*>|</g>")
_TAG, _DIGITS = re.compile("<[^>]+>"), re.compile(r"(\d\.\d\d)\d+")
_FLAT = re.compile(r' transform="rotate\(-0 [^"]*"|; stroke-linecap: square|; stroke-linejoin: miter|<defs>\s*</defs>')
_POINT = re.compile("<(use|text) (?!data-)")
_UNDATED = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}

Describe = Callable[[Row | str], str]
"""Function that returns the HTML attributes of a point, given its row of the summary or its text."""


def save(figure: Figure, form: str, salt: str) -> bytes:
    """Return the bytes of a figure as a file of the format `form`. Equal figures give equal bytes. `salt` is a text
    from which the ids of the elements in an SVG file are derived."""
    buffer = io.BytesIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": salt}):
        figure.savefig(buffer, format=form, dpi=_PNG_DPI, metadata=_UNDATED[form])
    # Fallback for browsers without DejaVu Sans.
    return buffer.getvalue().replace(b"'DejaVu Sans'", b"'DejaVu Sans', sans-serif")


def render_panel(
    name: str, panel: Panel, alt: str, describe: Describe = lambda row: "", *, halved: bool = False
) -> list[str]:
    """Return a panel as one or two SVG elements of a page: one for wide screens and one for narrow screens. If a panel
    looks the same on all screens, only the element for narrow screens is returned. If a panel does not fit on a phone,
    only the element for wide screens is returned.

    With `halved`, the panel takes half of the page's width on wide screens. `alt` is the label for screen readers.
    `describe` returns the HTML attributes of a point.
    """
    spaces = [(WIDE_IN, panel.space)] if panel.wide else [(HALF_IN, panel.space)] if halved else []
    narrow = panel.narrow if panel.wide else panel.space
    spaces += [(PANEL_IN, narrow)] if narrow else []
    return [
        _inline(f"{name}-{place}", draw_panel(panel, width, space), alt, describe)
        for place, (width, space) in enumerate(spaces)
    ]


def render_key(key: Key, figure: str) -> str:
    """Return the symbol of a legend's entry as an SVG element of a page."""
    style = tuple(sorted(key.style.items(), key=lambda item: item[0]))
    return _draw_key(style, patch=key.patch).replace(_KEY, f"{figure}-{_KEY}")


@functools.cache  # figures of a page share most entries of their legends
def _draw_key(style: tuple[tuple[str, Any], ...], *, patch: bool) -> str:
    with matplotlib.rc_context(STYLE):
        drawing = Drawing(*_KEY_IN)
        drawing.patch.set_visible(False)
        handle = Key("", dict(style), patch).build_handle()
        drawing.legend(handles=[handle], loc="center", borderpad=0, borderaxespad=0, handletextpad=0, handlelength=2.6)
    return _inline(f"{_KEY}-{zlib.crc32(repr((style, patch)).encode()):x}", drawing, "", lambda row: "")


def _inline(name: str, drawing: Drawing, alt: str, describe: Describe) -> str:
    """Return a drawing as an SVG element of a page, without XML prologue and with unique ids.

    The drawn elements carry attributes with the name of the series and the data of the points. `alt` is the label for
    screen readers. `describe` returns the HTML attributes of a point.
    """
    text = save(drawing, "svg", name).decode()
    # A page must stay below a megabyte. Metadata, fonts (set by the page), default styles and needless digits are cut.
    text = _SPARE.sub("", text[text.index("<svg") :])
    text = re.sub(r"\s*font-family: [^;\"]*;?", "", text)
    text = _FLAT.sub("", text)
    text = _TAG.sub(lambda tag: _DIGITS.sub(r"\1", tag[0]), " ".join(text.split()))
    # Colours become CSS variables, which the page defines for light and for dark mode.
    for place, colour in enumerate(COLOURS):
        text = text.replace(colour.lower(), f"var(--c{place})")
    text = text.replace(INK, "currentColor")
    parts = re.split(r'<g id="(m\d+)">', text)
    for place in range(1, len(parts), 2):
        shown = drawing.marks[parts[place]]
        parts[place] = f'<g data-series="{html.escape(shown.series)}">'
        for tip in shown.tips:  # points come in their order, and a text counts as a point
            attributes = f"{describe(tip)} ".lstrip()
            # a function, since a replacement text would interpret backslashes
            parts[place + 1] = _POINT.sub(lambda found, more=attributes: found[0] + more, parts[place + 1], count=1)
    text = re.sub(r'<g id="[^"]*">', "<g>", "".join(parts)).replace("xlink:href", "href")
    # Several drawings share a page, so an id is the drawing's name and a number.
    numbers = {known: place for place, known in enumerate(dict.fromkeys(re.findall(r'\bid="([^"]*)"', text)))}
    text = re.sub(r'(?<=\bid=")[^"]*|(?<=url\(#)[^)]*|(?<=href="#)[^"]*', lambda one: f"{name}-{numbers[one[0]]}", text)
    while _EMPTY.search(text):
        text = _EMPTY.sub("", text)
    text = _remove_plain_groups(text)
    label = f'role="img" aria-label="{html.escape(alt)}"' if alt else 'aria-hidden="true"'
    return re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf"<svg {label} \1>", text, count=1)


def _remove_plain_groups(text: str) -> str:
    """Return SVG text without the tags of groups that have no attribute. Such groups change nothing."""
    kept: list[bool] = []  # of each open group

    def choose(tag: re.Match[str]) -> str:
        if tag[0] == "</g>":
            return tag[0] if kept.pop() else ""
        kept.append(tag[0] != "<g>")
        return tag[0] if kept[-1] else ""

    return _GROUP.sub(choose, text)
