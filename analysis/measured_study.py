"""A set of runs in a notebook: its tables and figures at hand, each worked out when it is first asked for."""

import functools
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from bench.core.errors import UserError, suggest_nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from analysis.drawing import Picture
    from analysis.results import Results

_SCREEN_DPI = 110


class MeasuredStudy:
    """The answers of a set of runs: `table`, `summary`, `best`, `scaling` are DataFrames with units and meanings in
    `attrs`, and `plot` draws the report's figures."""

    def __init__(self, results: "Results") -> None:
        self.results = results

    def __repr__(self) -> str:
        table = self.results.table
        ok = int((table["outcome"] == "ok").sum())
        return f"<MeasuredStudy of {len(table):,} runs, {ok:,} of them ok>"

    def answer(self) -> str:
        """Return the answer in one to five sentences, a line each; empty where nothing was measured."""
        from analysis.answer import describe_answer

        return "\n".join(describe_answer(self.results))

    @functools.cached_property
    def table(self) -> "DataFrame":
        """One row per run, failed ones too."""
        return _annotate(self.results.table)

    @functools.cached_property
    def summary(self) -> "DataFrame":
        """One row per configuration, machine, environment class and kind of evidence: medians over repeats, with
        intervals."""
        return _annotate(self.results.summary)

    @functools.cached_property
    def best(self) -> "DataFrame":
        """The configurations of each question, the fastest first, with what is known of the others beside it."""
        from analysis.scaling import best

        return _annotate(best.as_table(best.best(self.results)))

    @functools.cached_property
    def scaling(self) -> "DataFrame":
        """A row per node count of each curve: speed-up, efficiency and serial fraction."""
        from analysis.scaling.curves import build_curve_table, build_curves

        return _annotate(build_curve_table(build_curves(self.results)))

    @functools.cached_property
    def plot(self) -> "StudyFigures":
        """The figures that have something to show, each a method without arguments that returns a matplotlib Figure."""
        return StudyFigures(self.results)


class StudyFigures:
    """The report's figures by name: `study.plot.step_time()`. Tab completes those that have something to show."""

    def __init__(self, results: "Results") -> None:
        self._results = results

    def __dir__(self) -> list[str]:
        return list(self._shown)

    def __repr__(self) -> str:
        return f"<figures: {', '.join(dir(self)) or 'none has anything to show'}>"

    def __getattr__(self, name: str) -> "Callable[[], Figure]":
        if name.startswith("_"):  # what notebooks look for in every object
            raise AttributeError(name)
        from analysis.figures import list_figures

        names = [one.name for one in list_figures()]
        if name not in names:
            raise AttributeError(f"plot.{name}: no such figure; {suggest_nearest(name, names)}")
        return functools.partial(self._draw, name)

    @functools.cached_property
    def _shown(self) -> "dict[str, Picture]":
        from analysis.figures import build_pictures

        return {figure.name: picture for figure, picture in sorted(build_pictures(self._results))}

    def _draw(self, name: str) -> "Figure":
        """Return a figure; a notebook shows it where it ends a cell, although pyplot has not made it."""
        from analysis.drawing import compose

        if name not in self._shown:
            remedy = f"choose from {', '.join(self._shown)}" if self._shown else "measure first"
            raise UserError(f"plot.{name}", "has nothing to show of these runs", remedy)
        figure = compose(self._shown[name])
        vars(figure)["_repr_png_"] = functools.partial(_render_png, figure)
        return figure


def open_study(paths: "str | Path | Iterable[str | Path]") -> MeasuredStudy:
    """Return the tables and figures of every record at or below `paths`.

    Files that are no records are named on standard error and left out. Raises UserError for a path that is not there.
    """
    from analysis import results

    found = results.read([paths] if isinstance(paths, str | Path) else paths)
    results.warn(found)
    return MeasuredStudy(found)


def _annotate(frame: "DataFrame") -> "DataFrame":
    from analysis.columns import annotate

    return annotate(frame)


def _render_png(figure: "Figure") -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_SCREEN_DPI, facecolor="white")
    return content.getvalue()
