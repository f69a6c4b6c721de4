"""The report's figures, one module each. `bench.core.plugins.FigurePlugin` documents what such a module defines."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from analysis.drawing import Picture
from analysis.results import Results
from bench.core import plugins


class FigureFile(NamedTuple):
    """A figure: name of its module, title, alternative text, needed runs, and the module."""

    name: str
    title: str
    alt: str
    needs: str  # runs without which the figure has no panels
    module: Any

    def build(self, results: Results) -> Picture:
        """Return the figure of a set of runs. The figure has no panels if there is nothing to show."""
        picture: Picture = self.module.picture(results)
        return picture


def list_figures() -> list[FigureFile]:
    """Return all figures, sorted by the number PLACE that their module defines, and then by name."""
    modules = [(name, plugins.load(plugins.FIGURE, name)) for name in plugins.list_names(plugins.FIGURE)]
    modules.sort(key=lambda named: (named[1].PLACE, named[0]))
    return [FigureFile(name, module.TITLE, module.ALT, module.NEEDS, module) for name, module in modules]


def build_pictures(results: Results) -> Iterator[tuple[FigureFile, Picture]]:
    """Yield the figures that have at least one panel for these results."""
    built = ((figure, figure.build(results)) for figure in list_figures())
    yield from ((figure, picture) for figure, picture in built if picture.panels)
