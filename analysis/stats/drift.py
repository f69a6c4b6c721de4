"""What the machine did meanwhile: its control points, the same configuration run first and last."""

from typing import NamedTuple

from analysis.stats.interval import Interval
from analysis.stats.ratio import Runs, of_steps
from bench.statistics import LEVEL


class Drift(NamedTuple):
    """Relative change of the control point's mean step time: 0.02 is 2 % slower at the end than at the beginning."""

    change: float
    interval: Interval | None  # of the change, within the two runs; None where they are too short

    @property
    def detected(self) -> bool:
        """Whether it is more than the steps of the two runs explain; what compares runs far apart in time is then in
        doubt by this much."""
        return self.interval is not None and not self.interval.low <= 0 <= self.interval.high


def drift(controls: Runs, level: float = LEVEL) -> Drift | None:
    """Return the drift from the first to the last control point, in the order in which they ran; None below two.

    Two runs of one configuration are never quite alike: what this finds may be their own difference, and the more
    control points in between, the better that is told apart by eye.
    """
    if len(controls) < 2:
        return None
    ratio = of_steps(controls[-1], controls[0], level)
    ends = ratio.interval
    return Drift(ratio.value - 1, ends and ends._replace(low=ends.low - 1, high=ends.high - 1))
