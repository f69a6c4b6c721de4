"""One file per picture; `bench.plugins.FigurePlugin` says what is in it."""

import contextlib
import html
import io
import multiprocessing
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from analysis.charts import Chart
from analysis.charts.scatter import ScatterChart
from analysis.plotting import INK, STYLE
from analysis.plotting.lean_font import register_lean_font, use_lean_font
from analysis.results import Results
from bench import plugins

FORMATS = ("svg", "pdf", "png")
MANY = 16
"""Runs whose figures take long enough to be drawn by several processes."""

_PNG_DPI = 200
_inherited: list[Results] = []  # in a process that draws


class Picture(NamedTuple):
    """One file of this package."""

    name: str
    title: str
    alt: str
    figure: Callable[[Results], Figure]
    applies: Callable[[Results], bool]
    chart: Callable[[Results], Chart | ScatterChart] | None  # the same as values, which the page draws


def list_pictures(results: Results | None = None) -> list[Picture]:
    """Return every picture that has something to show of `results`, or that there is at all, by PLACE and name."""
    modules = [(name, plugins.load(plugins.FIGURE, name)) for name in plugins.list_names(plugins.FIGURE)]
    modules.sort(key=lambda named: (named[1].PLACE, named[0]))
    found = [_load_picture(name, module) for name, module in modules]
    return [picture for picture in found if results is None or picture.applies(results)]


def render_pictures(
    results: Results, follow: Callable[[str, float], None] = lambda what, share: None
) -> list[tuple[Picture, dict[str, bytes]]]:
    """Draw every picture that has something to show, and return each with its files; of many runs on all cores.
    `follow` hears how many are drawn, in words and as a share."""
    chosen = list_pictures(results)[::-1]  # what shows single steps and ranks stands last and takes longest: first
    drawn: list[tuple[Picture, dict[str, bytes]]] = []
    for picture, files in zip(chosen, _render_each(chosen, results), strict=True):
        drawn.append((picture, files))
        follow(f"drew {len(drawn)} of {len(chosen)} figures", len(drawn) / len(chosen))
    return drawn[::-1]


def render_picture(picture: Picture, results: Results) -> dict[str, bytes]:
    """Draw a picture once and return its file in every format; equal results give equal bytes."""
    figure = picture.figure(results)
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": picture.name}):
        if figure.axes and (layout := figure.get_layout_engine()):
            layout.execute(figure)
            figure.set_layout_engine(None)  # laid out once, not for every format anew
        return {form: _save_figure(figure, form) for form in FORMATS}


def inline_svg(name: str, svg: bytes, alt: str) -> str:
    """Return an SVG file as an element of a page: no prologue, no metadata, ids of its own, `alt` for its label."""
    text = re.sub(r"<metadata>.*?</metadata>", "", svg.decode(), flags=re.DOTALL)
    text = text[text.index("<svg") :]
    text = re.sub(r'\bid="', f'id="{name}-', text)
    text = text.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    text = text.replace(INK, "currentColor").replace("fill: #ffffff", "fill: none")  # the page may be dark
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(alt)}" ', 1)


def _load_picture(name: str, module: Any) -> Picture:
    applies = getattr(module, "applies", lambda results: True)
    return Picture(name, module.TITLE, module.ALT, module.figure, applies, getattr(module, "chart", None))


def _render_each(chosen: list[Picture], results: Results) -> Iterator[dict[str, bytes]]:
    """Yield the files of each picture in order; where a process was ended before it had drawn its own, from here."""
    done = 0
    if len(results.table) >= MANY and len(chosen) > 1:
        if "pdf" in FORMATS:
            register_lean_font()  # once for all processes
        forked = multiprocessing.get_context("fork")  # what has been read and worked out is there already
        processes = min(len(os.sched_getaffinity(0)), len(chosen))
        try:
            with ProcessPoolExecutor(processes, forked, _begin_drawing, (results,)) as pool:
                for files in pool.map(_render_inherited, [picture.name for picture in chosen]):
                    yield files
                    done += 1
        except BrokenProcessPool:  # one was ended from outside
            pass
    for picture in chosen[done:]:
        yield render_picture(picture, results)


def _begin_drawing(results: Results) -> None:
    """Prepare a forked process: an interrupt is its parent's to act on, and a progress bar may hold a lock on the
    parent's streams for ever here."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    _inherited.append(results)


def _render_inherited(name: str) -> dict[str, bytes]:
    (results,) = _inherited
    return render_picture(next(picture for picture in list_pictures() if picture.name == name), results)


def _save_figure(figure: Figure, form: str) -> bytes:
    buffer = io.BytesIO()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[form]
    with use_lean_font(figure) if form == "pdf" else contextlib.nullcontext():
        figure.savefig(buffer, format=form, dpi=_PNG_DPI, metadata=undated)
    return buffer.getvalue()
