"""Observations of a successful run (outcome `ok`), written by hand instead of measured."""

from pathlib import Path

from bench.core import store
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


def saved_pair(study: Path, factor: float = 1.0) -> dict[str, Path]:
    """Write a recorded run of ddp and one of zero1, which do the same work, into the folder of a study. The losses of
    zero1 are multiplied by `factor`. Return the folder of each run by engine."""
    folders = {}
    for config_id in ("3f50d0c71f", "f729b5cca6"):
        record = store.read_record(Path("tests/data/runs.zip/smoke") / config_id / "0.0" / store.RECORD)
        engine, made = record.spec.engine.name, record.observations
        assert made and made.steps
        losses = tuple(loss and loss * (factor if engine == "zero1" else 1.0) for loss in made.steps.loss)
        steps = made.steps.model_copy(update={"loss": losses})
        changed = record.model_copy(update={"observations": made.model_copy(update={"steps": steps})})
        folders[engine] = study / config_id / "0.0"
        folders[engine].mkdir(parents=True)
        (folders[engine] / store.RECORD).write_bytes(store.to_json(changed))
    return folders
