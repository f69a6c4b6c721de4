"""The recorded runs that predictions are compared with, and how one of them is named."""

from pathlib import Path

from bench.formatting import format_count
from bench.prediction_inputs.memory_runs import MemoryRun, RecordedRuns

__all__ = ["MemoryRun", "RecordedRuns", "find_recorded_runs", "format_label"]


def find_recorded_runs(results: Path | None = None) -> RecordedRuns:
    """Return the recorded runs of a folder of results, by default that of the checkout this is a part of, or else the
    one here; UserError where they are not in it."""
    of_checkout = Path(__file__).parents[2] / "results"
    found = RecordedRuns(results or (of_checkout if of_checkout.is_dir() else Path("results")))
    found.require()
    return found


def format_label(run: MemoryRun) -> str:
    """Return what sets a run apart, in a line; a shape without a published name goes by its parameters."""
    spec = run.spec
    published = spec.model.parameters is not None
    model = spec.model.name if published else f"{spec.model.family.upper()} of {run.parameters / 1e6:.1f}M"
    ranks = format_count(spec.world_size, "rank")
    parts = [
        f"{model} {spec.engine.name}", ranks if run.rank is None else f"rank {run.rank} of {spec.world_size}",
        f"micro {spec.batch.micro}" + (f" × {spec.accumulation}" if spec.accumulation > 1 else ""),
        spec.precision, f"{'/'.join(map(str, spec.sequence.values()))} tokens",
    ]  # fmt: skip
    bucket = spec.engine.options.get("reduce_bucket_size")
    parts += [f"buckets of {bucket / 1e6:g}M"] if bucket else []
    parts += ["checkpointed"] * spec.activation_checkpointing
    parts += [spec.model.attention] * (spec.model.attention != "sdpa")
    parts += [f"dropout {spec.model.dropout}"] * (spec.model.dropout > 0)
    parts += [spec.data.name] * (spec.data.name != "synthetic")
    parts += [f"repeat {run.repeat}"] * (run.repeat > 0)
    return ", ".join(parts)
