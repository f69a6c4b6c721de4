"""One file per derived quantity; its name is the name of the column.

A new file is a new column, with nothing to register; `bench.plugins.MetricPlugin` says what is in it.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, get_type_hints

from bench import plugins
from bench.record import RunRecord

Better = Literal["more", "less", "neither"]


class Metric(NamedTuple):
    """A quantity derived from one record; `value` returns None where the record does not tell it."""

    name: str
    label: str
    unit: str
    better: Better
    value: Callable[[RunRecord], float | None]
    whole: bool  # an integer


@functools.cache
def load_metrics() -> dict[str, Metric]:
    """Return every metric by name."""
    return {name: _load_metric(name) for name in plugins.list_names(plugins.METRIC)}


def _load_metric(name: str) -> Metric:
    metric = plugins.load(plugins.METRIC, name)
    whole = get_type_hints(metric.value)["return"] == int | None
    return Metric(name, metric.LABEL, metric.UNIT, metric.BETTER, metric.value, whole)
