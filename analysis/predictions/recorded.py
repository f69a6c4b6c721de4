"""The recorded runs that predictions are compared with. They lie in a checkout, beside the tests that hold them."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.errors import UserError
from bench.record import RunRecord
from bench.spec import RunSpec
from bench.store import find_records, read_record

CHECKOUT = Path(__file__).parents[2]
RUNS = CHECKOUT / "tests" / "data" / "runs"
MEASURED = CHECKOUT / "results" / "measured"
INPUTS = CHECKOUT / "results" / "predictions" / "inputs"


class MemoryRun(NamedTuple):
    """The memory of one run in bytes of live tensors, of the rank that had most; None where it was not recorded."""

    spec: RunSpec
    parameters: int
    init_peak: int | None = None
    resident: int | None = None
    peak: int | None = None
    repeat: int = 0
    rank: int | None = None  # the one that was rehearsed; None where all were, or all were real

    @classmethod
    def of(cls, row: dict[str, str]) -> "MemoryRun":
        """Return the run of a row of recorded numbers."""
        numbers = {
            part: int(row[f"{part}_bytes"]) for part in ("init_peak", "resident", "peak") if row.get(f"{part}_bytes")
        }
        rank = int(row["rank"]) if row.get("rank") else None
        return cls(
            RunSpec.model_validate_json(row["spec"]),
            int(row["parameters"]),
            **numbers,
            repeat=int(row.get("repeat", 0)),
            rank=rank,
        )


def require_checkout() -> None:
    """Raise UserError where the recorded runs are not at hand: a wheel does not hold them."""
    if not (RUNS.is_dir() and INPUTS.is_dir()):
        rule = "compares with recorded runs, which an installed package does not hold"
        raise UserError("--predictions", rule, "run it in a checkout of the repository")


def table(name: str) -> list[dict[str, str]]:
    """Return the rows of a file of recorded numbers in results/predictions/inputs."""
    lines = (INPUTS / f"{name}.csv").read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def memory_runs(folder: str) -> Iterator[MemoryRun]:
    """Yield the memory of every recorded run of a folder of tests/data/runs, by model, engine, ranks and batch."""
    records = map(read_record, find_records([RUNS / folder]))
    yield from sorted(map(_memory, records), key=_order)


def tabled(name: str) -> Iterator[MemoryRun]:
    """Yield the memory of every run of a file of recorded numbers."""
    yield from (MemoryRun.of(row) for row in table(name))


def label(run: MemoryRun) -> str:
    """Return what sets a run apart, in a line; a shape without a published name goes by its parameters."""
    spec = run.spec
    published = spec.model.parameters is not None
    model = spec.model.name if published else f"{spec.model.family.upper()} of {run.parameters / 1e6:.1f}M"
    ranks = f"{spec.world_size} rank{'s' * (spec.world_size > 1)}"
    words = [
        f"{model} {spec.engine.name}", ranks if run.rank is None else f"rank {run.rank} of {spec.world_size}",
        f"micro {spec.batch.micro}" + (f" × {spec.accumulation}" if spec.accumulation > 1 else ""),
        spec.precision, f"{'/'.join(map(str, spec.sequence.values()))} tokens",
    ]  # fmt: skip
    bucket = spec.engine.options.get("reduce_bucket_size")
    words += [f"buckets of {bucket / 1e6:g}M"] if bucket else []
    words += ["checkpointed"] * spec.activation_checkpointing
    words += [spec.model.attention] * (spec.model.attention != "sdpa")
    words += [f"dropout {spec.model.dropout}"] * (spec.model.dropout > 0)
    words += [spec.data.name] * (spec.data.name != "synthetic")
    words += [f"repeat {run.repeat}"] * (run.repeat > 0)
    return ", ".join(words)


def _memory(record: RunRecord) -> MemoryRun:
    observed = record.observations
    assert observed is not None  # only runs that ended ok are kept there

    def most(name: str) -> int | None:
        return max((value for rank in observed.memory if (value := getattr(rank, name)) is not None), default=None)

    return MemoryRun(
        record.spec, observed.parameters, most("init_peak_bytes"), most("resident_bytes"),
        most("peak_allocated_bytes"), record.circumstance.repeat,
    )  # fmt: skip


def _order(run: MemoryRun) -> tuple[object, ...]:
    spec = run.spec
    of = run.parameters, spec.engine.name, spec.world_size, spec.batch.micro, spec.activation_checkpointing
    return *of, run.repeat
