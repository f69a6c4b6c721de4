"""A set of runs for use in a notebook: tables and figures as attributes, each computed at first use."""

import functools
import io
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bench.core.errors import UserError, suggest_nearest

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from analysis.drawing import Picture
    from analysis.results import Results

_SCREEN_DPI = 110
_PLACE = ("machine", "model", "nodes", "devices_per_node", "engine", "variant", "micro", "n")
_SUMMARY = (
    *_PLACE, "adapter", "outcome", "seeds", "validation_loss", "validation_loss_low", "validation_loss_high",
    "exact_match_before", "exact_match", "step_s", "step_s_low", "step_s_high", "interval_level",
    "tokens_per_s", "peak_allocated_bytes", "flags",
)  # fmt: skip
_BEST = (
    "question", *_PLACE, "adapter", "standing", "sample_s", "ratio", "ratio_low", "ratio_high", "tokens_per_s",
    "peak_allocated_bytes", "flags",
)  # fmt: skip
"""Columns of the short forms of `summary` and `best`, each if the table has it."""


class MeasuredStudy:
    """The tables and figures of a set of runs.

    `table`, `summary`, `best` and `scaling` are DataFrames with units and meanings in `attrs`. `summary` and `best`
    contain only their main columns; `full.summary` and `full.best` contain all of them. `trusted` is the same study
    without disturbed runs. `plot` has the figures of the report.
    """

    def __init__(self, results: "Results", *, short: bool = True, chosen_from: "Results | None" = None) -> None:
        """With `short`, the tables `summary` and `best` have only their main columns. If `results` are the trusted runs
        of a larger set, `chosen_from` is the larger set; otherwise `chosen_from` is None."""
        self.results = results
        self._short = short
        self._chosen_from = chosen_from

    def __repr__(self) -> str:
        return f"<MeasuredStudy: {self.results.describe()}>"

    def answer(self) -> str:
        """Return the results in a few sentences, one per line, held-out losses first. If there are no measured or no
        trusted runs, return a sentence that states this."""
        from analysis.answer import describe_answer, describe_untrusted

        if self._chosen_from and self.results.table.empty and not self._chosen_from.table.empty:
            return describe_untrusted(self._chosen_from)
        return "\n".join(describe_answer(self.results)) or "No run was measured."

    @functools.cached_property
    def full(self) -> "MeasuredStudy":
        """The same study with all columns in `summary` and `best`."""
        return MeasuredStudy(self.results, short=False, chosen_from=self._chosen_from)

    @functools.cached_property
    def trusted(self) -> "MeasuredStudy":
        """The same study without runs whose times do not measure their configuration: runs on a busy machine, paused
        runs, runs with an injected fault (drills), and runs on hosts outside their job."""
        from analysis.flags import UNTRUSTED

        flags = enumerate(self.results.table["flags"])
        kept = [place for place, raised in flags if not {*UNTRUSTED} & {*str(raised).split()}]
        return MeasuredStudy(self.results.take(kept), short=self._short, chosen_from=self._chosen_from or self.results)

    @functools.cached_property
    def table(self) -> "DataFrame":
        """The run table: one row per run, failed runs included."""
        return _annotate(self.results.table)

    @functools.cached_property
    def summary(self) -> "DataFrame":
        """The summary: medians over repeats, with intervals. It has one row for each combination of configuration,
        machine, environment class (device and software versions) and evidence (measured, rehearsed or only predicted).
        """
        summary = self.results.summary
        return _annotate(summary, [name for name in _SUMMARY if name in summary] if self._short else ())

    @functools.cached_property
    def best(self) -> "DataFrame":
        """The configurations of each question, the fastest first, with the verdict on each. A question is a group of
        configurations that do the same work on equal hardware."""
        from analysis.scaling import best

        found = best.as_table(best.best(self.results))
        return _annotate(found, [name for name in _BEST if name in found] if self._short else ())

    @functools.cached_property
    def scaling(self) -> "DataFrame":
        """The scaling curves, one row per node count: speed-up, efficiency and serial fraction."""
        from analysis.scaling.curves import build_curve_table, build_curves

        return _annotate(build_curve_table(build_curves(self.results)))

    @functools.cached_property
    def plot(self) -> "StudyFigures":
        """The figures for which these runs have data. Each figure is a method without arguments that returns a
        matplotlib Figure."""
        return StudyFigures(self.results)


class StudyFigures:
    """The figures of the report, such as `study.plot.step_time()`. Tab completion lists the figures for which these
    runs have data."""

    def __init__(self, results: "Results") -> None:
        self._results = results

    def __dir__(self) -> list[str]:
        return list(self._shown)

    def __repr__(self) -> str:
        return f"<figures: {', '.join(dir(self)) or 'no figure has data'}>"

    def __getattr__(self, name: str) -> "Callable[[], Figure]":
        if name.startswith("_"):  # notebooks look up methods such as _repr_html_ on every object
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
        """Return a figure that a notebook displays if it is the last object of a cell. Raise UserError if these runs
        have no data for the figure."""
        from analysis.drawing import compose

        if name not in self._shown:
            remedy = f"choose from {', '.join(self._shown)}" if self._shown else "measure first"
            is_busy = "busy" in " ".join(self._results.table["flags"]).split()
            why = " (times of busy runs are not drawn)" if is_busy else ""
            raise UserError(f"plot.{name}", f"has no data in these runs{why}", remedy)
        figure = compose(self._shown[name])
        # Notebooks call this method on the last object of a cell. pyplot would add it, but is not used.
        vars(figure)["_repr_png_"] = functools.partial(_render_png, figure)
        return figure


def open_study(paths: "str | Path | Iterable[str | Path]") -> MeasuredStudy:
    """Return the tables and figures of all records at or below `paths`.

    Files that are no records are skipped, with a warning. Raise UserError for a path that does not exist.
    """
    from analysis import results

    rule, remedy = "is not a path or a list of paths", 'give a results folder, e.g. open_study("results/runs/smoke")'
    if not isinstance(paths, str | Path | Iterable):
        raise UserError(repr(paths), rule, remedy)
    known = [paths] if isinstance(paths, str | Path) else list(paths)
    if not known or not all(isinstance(path, Path) or (isinstance(path, str) and path) for path in known):
        raise UserError(repr(known if known != [paths] else paths), rule, remedy)
    found = results.read(known)
    results.warn(found)
    return MeasuredStudy(found)


def _annotate(frame: "DataFrame", columns: "Sequence[str]" = ()) -> "DataFrame":
    from analysis.columns import annotate

    return annotate(frame[list(columns)] if columns else frame)


def _render_png(figure: "Figure") -> bytes:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=_SCREEN_DPI, facecolor="white")
    return content.getvalue()
