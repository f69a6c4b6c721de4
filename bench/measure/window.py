"""When to open the window and when to close it: pure decisions on the steps seen so far.

Both lengths are fixed before the run. An end that looks at the data biases the mean by which everything is ranked: a
window that met a stall would be prolonged and diluted, one that met none would not.

Rank 0 asks between blocks of steps and tells the others; a decision per rank would leave some waiting for ever.
"""

from collections.abc import Sequence
from typing import Literal

from bench.spec import MeasureSpec
from bench.statistics import series_interval

WindowEnd = Literal["window", "time", "slower"]
_SLOWER_LEVEL = 0.998  # of the interval by which a trial is ended: it is looked at after every block


def is_warmup_done(steps: int, elapsed_s: float, protocol: MeasureSpec, *, on_gpu: bool) -> bool:
    """Whether the warm-up has its steps and, on a GPU, its seconds: under load a GPU's clock settles with its
    temperature, in half a minute and more."""
    return steps >= protocol.warmup_steps and (not on_gpu or elapsed_s >= protocol.gpu_warmup_s)


def is_slower(step_s: Sequence[float], than_s: float, block: int) -> bool:
    """Whether steps take surely longer than `than_s`. It is asked after every block, so each answer has to be surer
    than an interval that is looked at once; the first comes after two blocks."""
    interval = series_interval(step_s, _SLOWER_LEVEL) if len(step_s) >= 2 * block else None
    return interval is not None and interval[0] > than_s


def find_stop_reason(steps: int, elapsed_s: float, protocol: MeasureSpec) -> WindowEnd | None:
    """Return why the window ends now, or None.

    `steps` are those of the window, launched ones included, `elapsed_s` its seconds so far. A window has at least the
    protocol's seconds and steps; where steps are too long for that, it ends at the most seconds that it may take.
    """
    if elapsed_s >= protocol.window_s and steps >= protocol.min_steps:
        return "window"
    return "time" if elapsed_s >= protocol.max_s else None
