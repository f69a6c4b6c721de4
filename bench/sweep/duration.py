"""How long one attempt at a point takes by the protocol of its measurement, and the time limit that follows. Pure."""

import math
from typing import NamedTuple

from bench.spec import MeasureSpec

START_S = (2.5, 17.0)
"""Seconds that an attempt takes beside its steps: forked from a process that has done its imports (README, packing);
and the slowest of the recorded runs, from cold. How long models of billions of parameters take to build was not
measured."""
MARGIN = 3.0
"""A time limit holds if steps take this many times as long as the high end of the prediction. Of 36 runs of the testbed
with fifteen other processes on its two cores, 28 took up to 3 times as long as on quiet ones, the worst 8.7 times;
a point whose time runs out all the same has the longest limit in its next attempt."""
LEAST_MIN = 2.0
"""No predicted limit is shorter: a cold start takes 9 s, and building an op for the first time 30 s more."""
_INSPECTED = 3  # untimed steps after the window


class AttemptMinutes(NamedTuple):
    """Of one attempt, from and to."""

    low: float
    high: float


def compute_shortest_s(protocol: MeasureSpec, step_s: float) -> float:
    """Return the seconds of all steps on a CPU."""
    return (_count_steps(protocol, step_s) + _INSPECTED * protocol.inspect) * step_s


def compute_longest_s(protocol: MeasureSpec, step_s: float) -> float:
    """Return the seconds of all steps on a GPU, which warms up by time too and is one block ahead."""
    return compute_shortest_s(protocol, step_s) + protocol.gpu_warmup_s + protocol.block_steps * step_s


def _count_steps(protocol: MeasureSpec, step_s: float) -> int:
    """Return the steps of warm-up and window; times are looked at between blocks."""
    block, enough = protocol.block_steps, max(protocol.min_steps, math.ceil(protocol.window_s / step_s))
    window = min(_round_up_to_blocks(enough, block), _round_up_to_blocks(math.ceil(protocol.max_s / step_s), block))
    return protocol.warmup_steps + window


def _round_up_to_blocks(steps: int, block: int) -> int:
    """Return `steps` in whole blocks."""
    return -(-steps // block) * block


def compute_minutes(protocol: MeasureSpec, low_s: float, high_s: float) -> AttemptMinutes:
    """Return how long an attempt takes whose steps take between `low_s` and `high_s`, its start included."""
    low, high = START_S
    return AttemptMinutes(
        (low + compute_shortest_s(protocol, low_s)) / 60, (high + compute_longest_s(protocol, high_s)) / 60
    )


def compute_limit_min(protocol: MeasureSpec, high_s: float, setup_min: float, bound_min: float) -> float:
    """Return the time limit of an attempt whose steps are predicted to take at most `high_s`.

    `setup_min` is what a start may take, `bound_min` the limit where nothing is predicted, which this never exceeds.
    """
    needed = setup_min + compute_longest_s(protocol, MARGIN * high_s) / 60
    return min(max(needed, LEAST_MIN), bound_min)


def compute_bound_min(protocol: MeasureSpec, setup_min: float) -> float:
    """Return the limit where nothing is predicted: what a start may take, and twice the longest window, since nobody
    knows how long the warm-up's steps are."""
    return setup_min + 2 * protocol.max_s / 60
