"""A PDF's letters come out of a part of the font; they are the whole font's letters, and text stays text."""

import re
import zlib

import matplotlib
from fontTools.ttLib import TTFont
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont

from analysis import figures, plotting
from analysis.plotting.lean_font import register_lean_font

WORDS = "zero2 · 0.5 µs × 10⁶ → ÅΔ…"


def test_the_part_of_the_font_has_the_letters_of_the_whole() -> None:
    for weight in ("normal", "bold"):
        part, whole = (
            TTFont(findfont(FontProperties(family=family, weight=weight), fallback_to_default=False))
            for family in (register_lean_font(), "DejaVu Sans")
        )
        assert len(part.getGlyphOrder()) < len(whole.getGlyphOrder()) / 3
        for letter in map(ord, WORDS):
            one, other = part.getBestCmap()[letter], whole.getBestCmap()[letter]
            assert part["hmtx"][one][0] == whole["hmtx"][other][0], chr(letter)
            assert (
                part["glyf"][one].getCoordinates(part["glyf"])[0]
                == (whole["glyf"][other].getCoordinates(whole["glyf"])[0])
            )


def test_text_of_a_pdf_is_found_and_what_the_part_lacks_comes_from_the_whole() -> None:
    drawn, again = draw(f"{WORDS} ж"), draw(f"{WORDS} ж")
    assert drawn == again
    pdf = drawn["pdf"]
    assert b"/CIDFontType2" in pdf and b"/Type3" not in pdf
    texts = [zlib.decompress(part) for part in re.findall(rb"stream\r?\n(x.*?)\r?\nendstream", pdf, re.DOTALL)]
    readable = b"".join(text for text in texts if b"begincmap" in text).decode().upper()
    assert all(f"<{ord(letter):04X}>" in readable for letter in f"{WORDS.replace(' ', '')}ж")
    assert "lean" not in drawn["svg"].decode().lower()


def draw(words: str) -> dict[str, bytes]:
    with matplotlib.rc_context(plotting.STYLE):
        figure = Figure((3, 1), layout="constrained")
        figure.add_subplot().set_title(words)
    picture = figures.Picture("words", "Words", "words", lambda results: figure, lambda results: True, None)
    return figures.render_picture(picture, None)  # type: ignore[arg-type]  # it shows nothing of results
