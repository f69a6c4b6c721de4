"""Metrics: quantities computed from a run's record, each a column of the run table.

Each module of this folder holds the metrics of one kind. A new module adds columns and needs no registration
(`bench.core.plugins.MetricPlugin`).
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, get_type_hints

from analysis.stats.intervals import Interval
from bench.core import plugins
from bench.core.errors import UserError
from bench.core.record import RunRecord

Better = Literal["more", "less", "neither"]


class Metric(NamedTuple):
    """A quantity that is computed from one record. `value` returns None if the record lacks the necessary data."""

    name: str
    label: str
    unit: str
    better: Better
    value: Callable[[RunRecord], float | None]

    @property
    def whole(self) -> bool:
        """Return True if the return annotation of `value` states that the metric is an integer. A lambda has no
        annotation, so a metric that is computed by a lambda counts as a float."""
        return _is_whole(self.value)


@functools.cache  # a report calls this for every run
def _is_whole(value: Callable[[RunRecord], float | None]) -> bool:
    return bool(get_type_hints(value).get("return") == int | None)


def build_interval_ends(
    name: str, label: str, unit: str, better: Better, find: Callable[[RunRecord], Interval | None]
) -> tuple[Metric, Metric]:
    """Return the metrics `<name>_low` and `<name>_high`, the ends of a quantity's interval. `find` returns this
    interval, which is computed from the steps of the run alone."""

    def build(end: str, word: str) -> Metric:
        text = f"{word} end of the interval of {label}: of one run 95 %, within the run; of several, see interval_level"
        return Metric(f"{name}_{end}", text, unit, better, lambda record: getattr(find(record), end, None))

    return build("low", "lower"), build("high", "upper")


@functools.cache
def load_metrics() -> dict[str, Metric]:
    """Return every metric by name. Raise UserError if two modules define the same name."""
    found: dict[str, Metric] = {}
    for file in plugins.list_names(plugins.METRIC):
        for metric in plugins.load(plugins.METRIC, file).METRICS:
            if metric.name in found:
                raise UserError(
                    f"metric {metric.name}", f"is defined in {file} and in another file", "rename one of the two"
                )
            found[metric.name] = metric
    return dict(sorted(found.items()))
