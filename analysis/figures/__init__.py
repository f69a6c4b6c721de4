"""The report's figures, one per file; `bench.core.plugins.FigurePlugin` documents the contents of such a file."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from analysis.drawing import Picture
from analysis.results import Results
from bench.core import plugins


class FigureFile(NamedTuple):
    """A figure: its file's name, title and alternative text, and its module."""

    name: str
    title: str
    alt: str
    module: Any

    def build(self, results: Results) -> Picture:
        """Return the figure of a set of runs, without a panel if it has nothing to show."""
        picture: Picture = self.module.picture(results)
        return picture


def list_figures() -> list[FigureFile]:
    """Return all figures by PLACE and name."""
    modules = [(name, plugins.load(plugins.FIGURE, name)) for name in plugins.list_names(plugins.FIGURE)]
    modules.sort(key=lambda named: (named[1].PLACE, named[0]))
    return [FigureFile(name, module.TITLE, module.ALT, module) for name, module in modules]


def build_pictures(results: Results) -> Iterator[tuple[FigureFile, Picture]]:
    """Yield all figures that have something to show."""
    built = ((figure, figure.build(results)) for figure in list_figures())
    yield from ((figure, picture) for figure, picture in built if picture.panels)
