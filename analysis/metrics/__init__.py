"""Quantities derived from a record, each a column. A file holds those of one kind; a new file is new columns, with
nothing to register (`bench.core.plugins.MetricPlugin`).
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, get_type_hints

from bench.core import plugins
from bench.core.errors import UserError
from bench.core.record import RunRecord

Better = Literal["more", "less", "neither"]


class Metric(NamedTuple):
    """A quantity derived from one record; `value` returns None where the record does not tell it."""

    name: str
    label: str
    unit: str
    better: Better
    value: Callable[[RunRecord], float | None]

    @property
    def whole(self) -> bool:
        """Whether it is an integer, as the return type of `value` says."""
        return _is_whole(self.value)


@functools.cache  # a report's page asks for each run that it shows
def _is_whole(value: Callable[[RunRecord], float | None]) -> bool:
    return bool(get_type_hints(value)["return"] == int | None)


@functools.cache
def load_metrics() -> dict[str, Metric]:
    """Return every metric by name; UserError for a name that stands twice."""
    found: dict[str, Metric] = {}
    for file in plugins.list_names(plugins.METRIC):
        for metric in plugins.load(plugins.METRIC, file).METRICS:
            if metric.name in found:
                raise UserError(f"metric {metric.name}", f"{file} has it and another file as well", "rename one")
            found[metric.name] = metric
    return dict(sorted(found.items()))
