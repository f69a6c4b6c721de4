"""Observations of a successful run (outcome `ok`), written by hand instead of measured."""

from bench.core.record import Observations, Steps


def observed(step_s: tuple[float, ...] = (0.1,) * 5, cut: int = 2) -> Observations:
    """Return observations with these step times in seconds. The first `cut` steps are warm-up."""
    return Observations(
        parameters=1,
        engine_config={},
        steps=Steps(
            cut=cut,
            steady=True,
            stopped="steps",
            step_s=step_s,
            data_wait_s=(0.0,) * len(step_s),
            loss=(1.0,) * len(step_s),
            window_s=sum(step_s[cut:]),
        ),
    )
