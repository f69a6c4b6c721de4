"""Where a series of steps becomes steady, from the steps themselves, warm-up included."""

import numpy as np
from numpy.typing import ArrayLike

BATCH = 5
LEAST = 10  # batches: of fewer, one steady series in seven would be called unsteady; of 20 batches, one in fifty is


def steady_cut(step_s: ArrayLike, batch: int = BATCH) -> int | None:
    """Return the index of the first steady step; None where the second half is not steady, or below ten batches.

    White's rule (Simulation 69, 1997) on batches of five: the cut whose rest tells its own mean best, by Σ (x - x̄)² /
    m² over the m batches left; where that still falls in the middle, no half is steady. A batch is told by its median
    instead of its mean, so that one slow step does not pass for a warm-up. The harness cuts while it runs; this one
    sees the whole series. A change in the second half is a drift and no warm-up.
    """
    steps = np.asarray(step_s, float)
    count = steps.size // batch
    if count < LEAST:
        return None
    batches = np.median(steps[: count * batch].reshape(count, batch), axis=1)
    batches -= np.median(batches)  # equal ones are 0 then, and rounding decides nothing
    rests = [batches[cut:] for cut in range(count // 2 + 1)]  # later ones are too short to judge by
    cut = int(np.argmin([rest.var() / rest.size for rest in rests]))
    return cut * batch if cut < count // 2 else None
