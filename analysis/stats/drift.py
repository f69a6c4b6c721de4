"""What the machine did meanwhile: its control points, the same configuration run several times in one allocation."""

import math
from typing import NamedTuple

import numpy as np

from analysis.stats.compare import Runs
from analysis.stats.intervals import Interval
from bench.core.statistics import LEVEL, quantile

LEAST_CONTROLS = 4
"""Of which a line leaves two degrees of freedom, for the difference that two runs of the same have anyhow."""


class Drift(NamedTuple):
    """Relative change of the control point's mean step time: 0.02 is 2 % slower at the end than at the beginning."""

    change: float
    interval: Interval | None  # of the change, between the runs; None of fewer than four, which tell no run effect

    @property
    def detected(self) -> bool:
        """Whether it is more than runs of the same differ anyhow; what compares runs far apart in time is then in
        doubt by this much."""
        return self.interval is not None and not self.interval.low <= 0 <= self.interval.high


def drift(controls: Runs, level: float = LEVEL) -> Drift | None:
    """Return the drift over the control points, in the order in which they ran; None below two.

    The line of least squares through the logarithms of their times, whose scatter around it is the effect of a run: of
    two or three runs no line tells it from drift, so of these there is a change and no interval.
    """
    if len(controls) < 2:
        return None
    logs = np.log([np.mean(run) for run in controls])
    if len(controls) < LEAST_CONTROLS:
        return Drift(math.expm1(logs[-1] - logs[0]), None)
    place = np.linspace(-0.5, 0.5, logs.size)
    slope = float(place @ logs / (place @ place))
    freedom = logs.size - 2
    left = logs - logs.mean() - slope * place
    reach = quantile(freedom, (1 + level) / 2) * math.sqrt(float(left @ left) / freedom / float(place @ place))
    low, high = math.expm1(slope - reach), math.expm1(slope + reach)
    return Drift(math.expm1(slope), Interval(low, high, "between repeats", level, logs.size))
