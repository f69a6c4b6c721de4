"""Recorded runs that predictions are compared with: their memory, and their names."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.core.errors import UserError
from bench.core.formatting import format_count
from bench.core.record import RunRecord
from bench.core.spec import RunSpec
from bench.core.store import find_records, read_record


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


class RecordedRuns(NamedTuple):
    """A folder of results that holds the recorded runs, as a checkout does and an installed package does not."""

    results: Path

    @property
    def measured(self) -> Path:
        """Runs by the machine that they were measured on."""
        return self.results / "measured"

    @property
    def runs(self) -> Path:
        """The runs of the machine with two cores, by study."""
        return self.measured / "two_cores.zip"

    @property
    def inputs(self) -> Path:
        """Tables of recorded numbers, and the machines of the testbed as they were calibrated."""
        return self.results / "predictions" / "inputs"

    def require(self) -> None:
        """Raise UserError where a folder is missing."""
        for folder in (self.runs, self.inputs):
            if not folder.exists():
                rule = f"holds no {folder.relative_to(self.results)}, with which predictions are compared"
                raise UserError(str(self.results), rule, "give the folder `results` of a checkout of the repository")

    def table(self, name: str) -> list[dict[str, str]]:
        """Return the rows of a table of recorded numbers."""
        lines = (self.inputs / f"{name}.csv").read_text(encoding="utf-8").splitlines()
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))

    def memory(self, study: str) -> Iterator[MemoryRun]:
        """Yield the memory of every run of a study, by model, engine, ranks and batch."""
        records = map(read_record, find_records([self.runs / study]))
        yield from sorted(map(_read_memory, records), key=_build_sort_key)

    def tabled(self, name: str) -> Iterator[MemoryRun]:
        """Yield the memory of every run of a table of recorded numbers."""
        yield from (MemoryRun.of(row) for row in self.table(name))

    def of_several_ranks(self) -> Iterator[MemoryRun]:
        """Yield the real runs that are rehearsed again, to see what a rehearsal lacks."""
        yield from (run for run in (*self.tabled("peaks"), *self.memory("peaks")) if run.spec.world_size > 1)


def _read_memory(record: RunRecord) -> MemoryRun:
    observed = record.observations
    assert observed is not None  # only runs that ended ok are kept there

    def most(name: str) -> int | None:
        return max((value for rank in observed.memory if (value := getattr(rank, name)) is not None), default=None)

    return MemoryRun(
        record.spec, observed.parameters, most("init_peak_bytes"), most("resident_bytes"),
        most("peak_allocated_bytes"), record.circumstance.repeat,
    )  # fmt: skip


def _build_sort_key(run: MemoryRun) -> tuple[object, ...]:
    spec = run.spec
    of = run.parameters, spec.engine.name, spec.world_size, spec.batch.micro, spec.activation_checkpointing
    return *of, run.repeat


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
