"""The report's figures, one module each. `bench.core.plugins.FigurePlugin` documents what such a module defines."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from analysis.drawing import Picture
from analysis.results import Results
from bench.core import plugins
from bench.core.installed_plugins import PluginError, guard, name_installed, warn_skipped


class FigureFile(NamedTuple):
    """A figure: name of its module, title, alternative text, needed runs, and the module."""

    name: str
    title: str
    alt: str
    needs: str  # runs without which the figure has no panels
    module: Any

    def build(self, results: Results) -> Picture:
        """Return the figure of a set of runs. The figure has no panels if there is nothing to show. Raise PluginError
        if a figure of another package is broken. The functions `draw` of its panels raise PluginError, too."""
        picture: Picture = self.module.picture(results)
        if (owner := name_installed("figure", self.name)) is None:
            return picture
        if not isinstance(picture, Picture):
            raise PluginError(owner, f"picture returned {picture!r:.80}, which is not a Picture", "return Picture(…)")
        panels = [replace(panel, draw=guard(panel.draw, owner, "draw")) for panel in picture.panels]
        return replace(picture, panels=panels)


def list_figures() -> list[FigureFile]:
    """Return all figures, sorted by the number PLACE that their module defines, and then by name."""
    modules = list(plugins.load_all(plugins.FIGURE))
    modules.sort(key=lambda named: (named[1].PLACE, named[0]))
    return [FigureFile(name, module.TITLE, module.ALT, module.NEEDS, module) for name, module in modules]


def build_pictures(results: Results) -> Iterator[tuple[FigureFile, Picture]]:
    """Yield the figures that have at least one panel for these results. A broken figure of another package is skipped
    with a warning."""
    for figure in list_figures():
        with skipping(figure):
            if (picture := figure.build(results)).panels:
                yield figure, picture


@contextmanager
def skipping(figure: FigureFile) -> Iterator[None]:
    """Context manager for building a figure. If a figure of another package is broken, log a warning and raise no
    exception."""
    try:
        yield
    except PluginError as error:
        warn_skipped(name_installed("figure", figure.name) or f"figure {figure.name}", str(error))
