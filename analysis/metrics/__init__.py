"""Metrics: quantities computed from a run's record, each a column of the run table.

Each module of this folder holds the metrics of one kind. A new module adds columns and needs no registration
(`bench.core.plugins.MetricPlugin`).
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, cast, get_args, get_type_hints

from analysis.stats.intervals import Interval
from bench.core import plugins
from bench.core.errors import UserError
from bench.core.installed_plugins import PluginError, guard, name_installed, warn_skipped
from bench.core.record import RunRecord

Better = Literal["more", "less", "neither"]


@dataclass(frozen=True)
class Metric:
    """A quantity that is computed from one record. `value` returns None if the record lacks the necessary data."""

    name: str
    label: str
    unit: str
    better: Better
    value: Callable[[RunRecord], float | None]

    def __post_init__(self) -> None:
        if self.better not in get_args(Better):
            rule = f"must be one of {', '.join(get_args(Better))}"
            raise UserError(f"metric {self.name}: better={self.better!r}", rule, "correct it")
        if not isinstance(self.unit, str):
            raise UserError(f"metric {self.name}: unit={self.unit!r}", "must be text", 'write "" for no unit')

    @property
    def whole(self) -> bool:
        """Return True if the return annotation of `value` states that the metric is an integer. A lambda has no
        annotation, so a metric that is computed by a lambda counts as a float."""
        return _is_whole(self.value)


@functools.cache  # a report calls this for every run
def _is_whole(value: Callable[[RunRecord], float | None]) -> bool:
    return bool(get_type_hints(value).get("return") == int | None)


def build_metric(
    compute: Callable[[RunRecord], float | None], label: str, unit: str, better: Better = "less"
) -> Metric:
    """Return the metric that a function computes. Its name is that of the function, without `compute_`."""
    return Metric(compute.__name__.removeprefix("compute_"), label, unit, better, compute)


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
    """Return every metric by name. A broken metric of another package is skipped with a warning. Raise UserError if two
    files of zeroscale define the same name."""
    found: dict[str, Metric] = {}
    # Files of zeroscale come first, so that another package cannot replace their metrics.
    files = sorted(plugins.load_all(plugins.METRIC), key=lambda named: name_installed("metric", named[0]) is not None)
    for file, module in files:
        owner = name_installed("metric", file)
        for metric in module.METRICS:
            try:
                metric = _guard_metric(metric, owner) if owner else metric
                if metric.name in found:
                    rule = f"column {metric.name} is also defined in another file"
                    raise (PluginError if owner else UserError)(
                        owner or f"metric {file}", rule, "rename one of the two"
                    )
                found[metric.name] = metric
            except PluginError as error:
                warn_skipped(error.value, str(error))
    return dict(sorted(found.items()))


def _guard_metric(metric: object, owner: str) -> Metric:
    """Return a wrapper of a metric that another package defines. If the metric cannot be computed or has a wrong type,
    the wrapper logs a warning, and its value is None. `owner` is the plug-in's kind, name and package. Raise
    PluginError if `metric` is not a Metric."""
    if not isinstance(metric, Metric):
        rule = f"METRICS contains {metric!r:.80}, which is not a Metric"
        raise PluginError(owner, rule, "write METRICS = (Metric(…),) with the comma, or [Metric(…)]")
    kind = int | None if metric.whole else float | int | None
    checked = guard(metric.value, owner, "its function", kind)

    def compute(record: RunRecord) -> float | None:
        try:
            return cast("float | None", checked(record))
        except PluginError as error:
            warn_skipped(f"column {metric.name}", str(error))
            return None

    compute.__annotations__["return"] = kind
    return replace(metric, value=compute)
