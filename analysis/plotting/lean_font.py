"""The figures' font, cut down once, so that a PDF takes its letters out of a small font.

A PDF holds the letters that it shows, and matplotlib takes them out of the font anew for every file and weight. Out of
the whole of DejaVu Sans, six thousand glyphs and the rules to join them, that takes longer than the rest of the file.
"""

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fontTools import subset
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, fontManager
from matplotlib.text import Text

from analysis.plotting import STYLE

_LEAN = "Zeroscale Lean"
_CHARACTERS = (*range(0x20, 0x250), *range(0x370, 0x400), *range(0x2000, 0x20A0), *range(0x2190, 0x2300))
"""Latin, Greek, punctuation, raised and lowered digits, arrows and mathematics. Others come out of the whole font."""


@contextlib.contextmanager
def use_lean_font(figure: Figure) -> Iterator[None]:
    """Set a figure that is laid out in the small font meanwhile: its letters and their places stay what they were."""
    families = STYLE["font.family"]
    texts = [text for text in figure.findobj(Text) if text.get_fontfamily() == families]
    for text in texts:
        text.set_fontfamily([register_lean_font(), *families])
    yield
    for text in texts:
        text.set_fontfamily(families)


@functools.cache
def register_lean_font() -> str:
    """Cut the font and tell matplotlib of it, for as long as this process lives; return the name of its family.

    A process that forks others to draw calls it first: it alone removes the files as it ends."""
    folder = Path(_open_folder().name)
    for weight in ("normal", "bold"):
        path = folder / f"{weight}.ttf"
        _cut_font(findfont(FontProperties(family=STYLE["font.family"], weight=weight)), path)
        fontManager.addfont(path)
        fontManager.ttflist[-1] = dataclasses.replace(fontManager.ttflist[-1], name=_LEAN)  # a PDF says the name inside
    return _LEAN


def _cut_font(whole: str, path: Path) -> None:
    """Write the part of a font that has the usual characters, without the rules that join letters."""
    options = subset.Options(glyph_names=True, drop_tables=["FFTM", "GDEF", "GPOS", "GSUB", "MATH"])
    font = subset.load_font(whole, options)
    subsetter = subset.Subsetter(options)
    subsetter.populate(unicodes=_CHARACTERS)
    subsetter.subset(font)
    font.save(path, reorderTables=False)


@functools.cache
def _open_folder() -> "tempfile.TemporaryDirectory[str]":
    return tempfile.TemporaryDirectory(prefix="zeroscale-font-")
