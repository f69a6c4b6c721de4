"""One file per picture; `bench.plugins.FigurePlugin` says what is in it."""

import html
import io
import multiprocessing
import os
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import matplotlib
from matplotlib.figure import Figure

from analysis.charts import Chart
from analysis.plotting import INK, STYLE
from analysis.results import Results
from bench import plugins

FORMATS = ("svg", "pdf", "png")
MANY = 10_000
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
    chart: Callable[[Results], Chart] | None  # the same as values, which the page draws so that it can be narrowed


def list_pictures(results: Results | None = None) -> list[Picture]:
    """Return every picture that has something to show of `results`, or that there is at all, by PLACE and name."""
    modules = [(name, plugins.load(plugins.FIGURE, name)) for name in plugins.list_names(plugins.FIGURE)]
    modules.sort(key=lambda named: (named[1].PLACE, named[0]))
    found = [_load_picture(name, module) for name, module in modules]
    return [picture for picture in found if results is None or picture.applies(results)]


def render_pictures(results: Results) -> list[tuple[Picture, dict[str, bytes]]]:
    """Draw every picture that has something to show, and return each with its files; of many runs on all cores."""
    chosen = list_pictures(results)
    if len(results.table) < MANY:
        return [(picture, render_picture(picture, results)) for picture in chosen]
    forked = multiprocessing.get_context("fork")  # what has been read and worked out is there already
    with ProcessPoolExecutor(os.cpu_count(), forked, _remember_results, (results,)) as pool:
        return list(zip(chosen, pool.map(_render_inherited, [picture.name for picture in chosen]), strict=True))


def render_picture(picture: Picture, results: Results) -> dict[str, bytes]:
    """Draw a picture once and return its file in every format; equal results give equal bytes."""
    figure = picture.figure(results)
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": picture.name}):
        figure.draw_without_rendering()
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


def _remember_results(results: Results) -> None:
    _inherited.append(results)


def _render_inherited(name: str) -> dict[str, bytes]:
    (results,) = _inherited
    return render_picture(next(picture for picture in list_pictures() if picture.name == name), results)


def _save_figure(figure: Figure, form: str) -> bytes:
    buffer = io.BytesIO()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}, "png": {}}[form]
    figure.savefig(buffer, format=form, dpi=_PNG_DPI, metadata=undated)
    return buffer.getvalue()
