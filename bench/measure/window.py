"""When to open the window and when to close it: pure decisions on the step times seen so far.

Rank 0 asks between blocks of steps and tells the others; a decision per rank would leave some waiting for ever.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Literal

from bench.spec import GPU_WARMUP, MeasureSpec
from bench.statistics import LIKELY, SURE, is_changing, series_interval

WindowEnd = Literal["width", "steps", "time", "slower"]
_NOISE_FLOOR = 0.05  # medians of two neighbouring blocks that differ by less are steady whatever their scatter


def is_steady(step_s: Sequence[float], block: int) -> bool:
    """Whether the last two blocks tell the same time: medians apart by less than 5 %, or than twice the standard error
    that their own scatter (median absolute deviation) gives."""
    if len(step_s) < 2 * block:
        return False
    before, last = step_s[-2 * block : -block], step_s[-block:]
    centre = statistics.median(last)
    scatter = 1.4826 * statistics.median(abs(x - statistics.median(part)) for part in (before, last) for x in part)
    difference = abs(centre - statistics.median(before))
    return difference <= max(_NOISE_FLOOR * centre, 2 * scatter * math.sqrt(2 / block))


def is_warmup_done(step_s: Sequence[float], protocol: MeasureSpec, least_s: float = 0.0) -> bool:
    """Whether the warm-up is over after the steps seen so far: after `least_s`, enough of them and steady, or a budget
    of steps spent that begins then."""
    late = sum(seconds >= least_s for seconds in accumulate(step_s)) if least_s else len(step_s)
    enough = late > 0 and len(step_s) >= protocol.warmup_steps and is_steady(step_s, protocol.block_steps)
    return enough or late >= protocol.warmup_max_steps


def warmup_s(protocol: MeasureSpec, on_gpu: bool) -> float:
    """Return the seconds that a warm-up takes at least. Under load a GPU's clock settles with its temperature, in half
    a minute and more."""
    return GPU_WARMUP * protocol.min_s if on_gpu else 0.0


def is_slower(step_s: Sequence[float], than_s: float, block: int) -> bool:
    """Whether steps take surely longer than `than_s`. It is asked after every block, so each answer has to be surer
    than an interval that is looked at once; the first comes after two blocks."""
    interval = series_interval(step_s, SURE) if len(step_s) >= 2 * block else None
    return interval is not None and interval[0] > than_s


def find_stop_reason(
    step_s: Sequence[float],
    elapsed_s: float,
    protocol: MeasureSpec,
    under_way: int = 0,
    follow: Callable[[float], None] = lambda width: None,
) -> WindowEnd | None:
    """Why the window ends now, or None: its interval is as narrow as asked and nothing hints at a change, or a budget
    is spent. A change that only seems to be there takes some more steps to go away, one that is there to be proved.

    `step_s` are the window's own steps, `elapsed_s` its seconds so far, `under_way` the steps that it will have
    besides. Steps are a budget for what comes after the least seconds: so many short ones may not have seen a device's
    clock settle, or a neighbour come and go.
    `follow` hears the width of the interval, relative to the median, once it is looked at.
    """
    long_enough = elapsed_s >= protocol.min_s
    if long_enough and len(step_s) + under_way >= protocol.max_steps:
        return "steps"
    if elapsed_s >= protocol.max_s:
        return "time"
    interval = series_interval(step_s) if long_enough and len(step_s) >= protocol.min_steps else None
    if interval is None:
        return None
    follow(width := (interval[1] - interval[0]) / statistics.median(step_s))
    return "width" if width <= protocol.width and not is_changing(step_s, protocol.width, LIKELY) else None
