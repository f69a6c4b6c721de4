"""Memory of recorded runs and of rehearsals on a CPU, compared with predictions. A rehearsal runs one rank alone, with
simulated collectives."""

import csv
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from analysis.validation import PredictionComparison, PredictionPoint, build_comparison
from analysis.validation.published_memory import estimate_memory, find_stage
from bench.core.errors import UserError
from bench.core.formatting import format_count
from bench.core.record import RunRecord
from bench.core.spec import RunSpec, config_id
from bench.core.store import find_records, read_record
from bench.predict.memory import predict_memory

PARTS = ("init_peak", "resident", "peak")


class MemoryRun(NamedTuple):
    """Bytes of live tensors in one run. Each field is the maximum over the run's ranks, so two fields may come from
    different ranks. A field is None if it was not recorded."""

    spec: RunSpec
    parameters: int
    init_peak: int | None = None
    resident: int | None = None
    peak: int | None = None
    repeat: int = 0
    rank: int | None = None  # the rehearsed rank; None if all ranks were rehearsed, or all were real

    @classmethod
    def of(cls, row: dict[str, str]) -> "MemoryRun":
        """Return the run that one row of a table of recorded numbers describes."""
        numbers = {part: int(row[f"{part}_bytes"]) for part in PARTS if row.get(f"{part}_bytes")}
        rank = int(row["rank"]) if row.get("rank") else None
        spec = RunSpec.model_validate_json(row["spec"])
        return cls(spec, int(row["parameters"]), **numbers, repeat=int(row.get("repeat", 0)), rank=rank)

    @classmethod
    def of_record(cls, record: RunRecord) -> "MemoryRun":
        """Return the memory of a run that ended with outcome `ok`."""
        observed = record.observations
        assert observed is not None  # the study keeps only runs that ended ok

        def find_most(name: str) -> int | None:
            return max((value for rank in observed.memory if (value := getattr(rank, name)) is not None), default=None)

        built, resident, peak = map(find_most, ("init_peak_bytes", "resident_bytes", "peak_allocated_bytes"))
        return cls(record.spec, observed.parameters, built, resident, peak, record.circumstance.repeat)

    @property
    def stage(self) -> int:
        """ZeRO stage of the run. It is 0 for an engine without a DeepSpeed config; DDP divides no model states, like
        stage 0."""
        return find_stage(self.spec) or 0


class RecordedRuns(NamedTuple):
    """Folder `results` of a checkout, with recorded runs. An installed package has no such folder."""

    results: Path

    @property
    def measured(self) -> Path:
        """Folder with the recorded runs, which has an entry for each machine."""
        return self.results / "measured"

    @property
    def runs(self) -> Path:
        """Archive of the runs recorded on the machine with two cores. It has a folder for each study."""
        return self.measured / "two_cores.zip"

    @property
    def inputs(self) -> Path:
        """Folder with tables of recorded numbers, and with the calibrated machines of the testbed."""
        return self.results / "predictions" / "inputs"

    def table(self, name: str) -> list[dict[str, str]]:
        """Return the rows of a table of recorded numbers. `name` is the table's file name without `.csv`."""
        lines = (self.inputs / f"{name}.csv").read_text(encoding="utf-8").splitlines()
        return list(csv.DictReader(line for line in lines if not line.startswith("#")))

    def memory(self, study: str) -> list[MemoryRun]:
        """Return the recorded memory of every run of a study, sorted by model size, engine, ranks and batch."""
        records = map(read_record, find_records([self.runs / study]))
        return sorted(map(MemoryRun.of_record, records), key=_build_sort_key)

    def tabled(self, name: str) -> Iterator[MemoryRun]:
        """Yield the recorded memory of every run in a table of recorded numbers. `name` is as in `table`."""
        yield from map(MemoryRun.of, self.table(name))

    def of_several_ranks(self) -> Iterator[MemoryRun]:
        """Yield the real runs of several ranks, for comparison with rehearsals (which run one rank alone) of the same
        configuration."""
        yield from (run for run in (*self.tabled("peaks"), *self.memory("peaks")) if run.spec.world_size > 1)


def _build_sort_key(run: MemoryRun) -> tuple[object, ...]:
    spec = run.spec
    batch = spec.batch.micro, spec.activation_checkpointing
    return run.parameters, spec.engine.name, spec.world_size, *batch, run.repeat


def find_recorded_runs(results: Path | None = None) -> RecordedRuns:
    """Return the recorded runs in the folder `results`. The default is the folder of this checkout, or else `results`
    in the current folder. Raise UserError if the folder has no recorded runs."""
    of_checkout = Path(__file__).parents[2] / "results"
    found = RecordedRuns(results or (of_checkout if of_checkout.is_dir() else Path("results")))
    for folder in (found.runs, found.inputs):
        if not folder.exists():
            rule = f"has no {folder.relative_to(found.results)}, with which predictions are compared"
            raise UserError(str(found.results), rule, "give the folder `results` of a checkout of the repository")
    return found


def format_label(run: MemoryRun) -> str:
    """Return a label of one line for a run. A model without a published shape is labelled by its family and number of
    parameters."""
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
    parts += [spec.adapter.name] * (spec.adapter.rank is not None)
    parts += ["compiled blocks"] * (spec.model.compile == "blocks")
    parts += [spec.model.attention] * (spec.model.attention != "sdpa")
    parts += [f"dropout {spec.model.dropout}"] * (spec.model.dropout > 0)
    parts += [spec.data.name] * (spec.data.name != "synthetic")
    parts += [f"repeat {run.repeat}"] * (run.repeat > 0)
    return ", ".join(parts)


# -- comparisons

GATHERED = "gloo copies gathered tensors, mostly on threads of its own; simulated collectives never do"
THREADS = "gloo's threads free a reduced bucket at a different time on every rank, in every run"
BOUNDED = "the formula is an upper bound: all activations of a checkpointed block with the most gathered weights"
NOT_RECORDED: Any = {"verdict": "not testable", "reason": "not recorded"}
REAL_REASONS = {1: THREADS, 2: THREADS, 3: GATHERED}
PAIR_REASONS = {"peak": REAL_REASONS, "init_peak": {3: GATHERED}, "resident": {}}
"""Reasons for exceptions (points whose error exceeds the bound), by ZeRO stage. PAIR_REASONS holds the reasons for
comparisons of a rehearsal with a real run, by quantity."""


def compare_real_runs(recorded: RecordedRuns) -> list[PredictionComparison]:
    """Return three comparisons of predictions with real runs. The first is of peak memory in steps, the second of peak
    memory while the engine is built. The third compares peaks in steps with predictions that were made before the
    runs."""
    grid = recorded.memory("peaks")
    runs = [*grid, *recorded.memory("smoke"), *recorded.tabled("peaks")]
    blind = {row["config_id"]: int(row["peak_bytes"]) for row in recorded.table("predicted_blind")}
    pairs = [(run, blind[config_id(run.spec)], run.peak or 0) for run in grid]
    return [
        _compare("peak_memory", "peak", runs, REAL_REASONS),
        _compare("peak_memory_building", "init_peak", runs, REAL_REASONS),
        _compare_pairs("peak_memory_blind", REAL_REASONS, pairs),
    ]


def compare_rehearsals(recorded: RecordedRuns) -> list[PredictionComparison]:
    """Return the comparisons of predicted memory with rehearsals (which run one rank alone), and of rehearsals with
    real runs."""
    table = recorded.table("rehearsed_beside_real")
    first = [row for row in table if row["repeat"] == "0"]
    again = [MemoryRun.of(row | {f"{part}_bytes": row[f"rehearsed_{part}_bytes"] for part in PARTS}) for row in first]
    runs = [*recorded.tabled("rehearsed"), *again]
    names = {"peak": "rehearsed_peak", "resident": "rehearsed_resident", "init_peak": "rehearsed_building"}
    found = [_compare(name, part, runs, {3: BOUNDED}, rehearsed=True) for part, name in names.items()]
    for part in ("resident", "peak", "init_peak"):
        rehearsed, real = ([int(row[f"{kind}_{part}_bytes"]) for row in table] for kind in ("rehearsed", "real"))
        pairs = zip(map(MemoryRun.of, table), rehearsed, real, strict=True)
        found.append(_compare_pairs(f"rehearsed_beside_real_{part}", PAIR_REASONS[part], pairs))
    return found


def _compare(
    name: str, part: str, runs: Iterable[MemoryRun], reasons: dict[int, str], *, rehearsed: bool = False
) -> PredictionComparison:
    """Return the comparison of recorded memory with its prediction and with DeepSpeed's estimate. `part` is the
    compared quantity, which is a field of MemoryRun. DeepSpeed has no estimate for the peak while an engine is built
    (`init_peak`).

    `name` is the comparison's name in `comparisons.yaml`. `reasons` maps a ZeRO stage to the reason for errors beyond
    the bound. `rehearsed` is True if the runs are rehearsals, each of which ran one rank alone.
    """
    points = []
    for run in runs:
        predicted = getattr(predict_memory(run.spec, "cpu", rehearsed=rehearsed), part)
        rival = None if part == "init_peak" else estimate_memory(run.spec, run.parameters)
        point = PredictionPoint(format_label(run), predicted, getattr(run, part), reason=reasons.get(run.stage, ""))
        points.append(point._replace(rival=rival) if point.truth is not None else point._replace(**NOT_RECORDED))
    return build_comparison(name, points)


def _compare_pairs(
    name: str, reasons: dict[int, str], pairs: Iterable[tuple[MemoryRun, int, int]]
) -> PredictionComparison:
    """Return the comparison of predicted with true bytes. `pairs` holds for each run the run itself, the predicted
    bytes and the true bytes. `reasons` maps a ZeRO stage to the reason for errors beyond the bound."""
    points = (
        PredictionPoint(format_label(run), predicted, truth, reason=reasons.get(run.stage, ""))
        for run, predicted, truth in pairs
    )
    return build_comparison(name, points)
