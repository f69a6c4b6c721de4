"""Step times of recorded runs compared with predictions. The runs were made on the testbed (a Slurm cluster simulated
on one machine) at several link bandwidths, and on GPUs."""

import itertools
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from analysis import results
from analysis.metrics.step_time import compute_compute_s
from analysis.table import group_by, list_rows
from analysis.validation import (
    PredictionComparison,
    PredictionPoint,
    build_comparison,
    compute_error_percent,
    judge,
)
from analysis.validation.published_memory import estimate_flops, estimate_memory
from analysis.validation.recorded import NOT_RECORDED, MemoryRun, RecordedRuns, format_label
from bench.core.errors import UserError
from bench.core.formatting import format_count
from bench.core.machine import Machine
from bench.core.record import RunRecord
from bench.core.store import find_records, read_record
from bench.predict.memory import predict_memory
from bench.predict.step_time import predict_step_time
from bench.predict.step_time.compute import read_rates
from bench.predict.step_time.network import change_link_speed

RATES: dict[str, float] = {"100mbit": 12.5e6, "400mbit": 50e6, "1gbit": 125e6}
"""Bandwidths of the link between nodes in the recorded testbed runs, in bytes/s, by name."""
SLOW, FAST = "100mbit", "1gbit"
"""Link bandwidths at which collectives were calibrated. They were chosen before any step time was measured. The
calibration used no step times."""
STUDY = "step_time"

Place = tuple[str, int]
"""Name of an engine and number of nodes."""


class PredictedStep(NamedTuple):
    """Measured and predicted step time of a configuration at one link bandwidth (`rate`), in seconds.

    The measured value `step_s` is the median over allocations; `low` and `high` are its interval. There are three
    predictions. `predicted_s` uses the compute time of rehearsals, which run one rank alone, and has an interval.
    `by_rates_s` uses calibrated rates alone. `rule_of_thumb_s` divides 6·N·tokens, the usual estimate of FLOPs, by the
    FLOP rate of the best matrix product.
    """

    rate: str
    engine: str
    nodes: int
    step_s: float
    low: float
    high: float
    predicted_s: float
    predicted_low: float
    predicted_high: float
    by_rates_s: float
    rule_of_thumb_s: float

    @property
    def inside(self) -> bool:
        """True if the measured step time lies in the interval that was predicted from rehearsals (runs of one rank
        alone)."""
        return self.predicted_low <= self.step_s <= self.predicted_high

    @property
    def where(self) -> str:
        """Link rate and number of nodes, as text."""
        return f"{self.rate}, {format_count(self.nodes, 'node')}"


def predict_steps(recorded: RecordedRuns) -> list[PredictedStep]:
    """Return measured and predicted step times of every recorded configuration, by link rate, engine and nodes."""
    slow, fast = _read_machine(recorded, SLOW), _read_machine(recorded, FAST)
    computing = _read_rehearsed_seconds(recorded)
    found: list[PredictedStep] = []
    for rate, speed in RATES.items():
        machine = slow if rate == SLOW else change_link_speed(slow, fast, speed)
        found += _list_predicted_steps(recorded.runs / STUDY / rate, machine, computing)
    return found


def _list_predicted_steps(folder: Path, machine: Machine, computing: Mapping[Place, float]) -> Iterator[PredictedStep]:
    found = results.read([folder])
    for row in sorted(list_rows(found.summary), key=lambda row: (row["engine"], row["nodes"])):
        spec, place = found.specs[row["config_id"]], (row["engine"], row["nodes"])
        measured = row["step_s"], row["step_s_low"], row["step_s_high"]
        by_rates = predict_step_time(spec, machine, "cpu")
        by_rehearsal = predict_step_time(spec, machine, "cpu", rehearsed_s=computing[place])
        predicted = by_rehearsal.step_s, by_rehearsal.low_s, by_rehearsal.high_s
        tokens = spec.batch.micro * spec.accumulation * spec.tokens_per_sample
        best = read_rates(machine.model_dump_json(), spec.precision, "cpu").ceiling
        rule_of_thumb_s = estimate_flops(row["parameters"], tokens) / best
        yield PredictedStep(folder.name, *place, *measured, *predicted, by_rates.step_s, rule_of_thumb_s)


def _read_machine(recorded: RecordedRuns, rate: str) -> Machine:
    plain_yaml = (recorded.inputs / f"bed_{rate}.yaml").read_text(encoding="utf-8")
    return Machine.model_validate(yaml.safe_load(plain_yaml))


def _read_rehearsed_seconds(recorded: RecordedRuns) -> dict[Place, float]:
    """Return the compute seconds of a step for each engine and number of nodes. Each value is the median over
    rehearsals, which run one rank alone on the machine."""
    steps = recorded.runs / STUDY
    records = map(read_record, find_records([steps / "rehearsals", steps / "rehearsals_again"]))
    groups = group_by(records, lambda record: (record.spec.engine.name, record.spec.nodes))
    medians = {place: filter(None, map(compute_compute_s, members)) for place, members in groups.items()}
    return {place: statistics.median(of) for place, of in medians.items()}


BEYOND = 25.0
"""Largest allowed distance of a prediction from the measured interval, in percent of the interval's nearer end."""


def compare_testbed(recorded: RecordedRuns) -> list[PredictionComparison]:
    """Return four comparisons for runs on the testbed (a Slurm cluster simulated on one machine) at three bandwidths of
    the link between nodes. Collectives were calibrated at the lowest and the highest of these bandwidths.

    The first three compare step times: at the bandwidth without a calibration, at the two calibrated bandwidths, and at
    all three. The third predicts compute times from calibrated rates instead of rehearsals, which run one rank alone.
    The fourth compares, for pairs of engines, the engine predicted to be faster with the engine measured to be faster.
    """
    found = predict_steps(recorded)
    calibrated = [one for one in found if one.rate in (SLOW, FAST)]
    blind = [one for one in found if one.rate not in (SLOW, FAST)]
    by_rates = [one._replace(predicted_s=one.by_rates_s) for one in found]
    tables = {"step_times_blind": blind, "step_times": calibrated, "step_times_by_rates": by_rates}
    times = [
        build_comparison(name, map(_build_time_point, steps), inside=sum(s.inside for s in steps), count=len(steps))
        for name, steps in tables.items()
    ]
    return [*times, build_comparison("stage_order", list_order_points(found))]


def compute_distance_percent(predicted: float, low: float, high: float) -> float:
    """Return the signed distance of a prediction from an interval, in percent of the interval's nearer end. It is 0
    inside the interval."""
    return compute_error_percent(predicted, min(max(predicted, low), high))


def list_order_points(found: Sequence[PredictedStep]) -> Iterator[PredictionPoint]:
    """Yield a point for each pair of engines at the same link bandwidth and number of nodes: the engine that is
    predicted to be faster, and the engine that was measured as faster. If the measured intervals overlap, the point is
    not testable."""
    for _, members in itertools.groupby(sorted(found, key=_build_sort_key), key=_build_sort_key):
        for one, other in itertools.combinations(members, 2):
            yield _build_pair_point(one, other)


def _build_time_point(one: PredictedStep) -> PredictionPoint:
    outside = compute_distance_percent(one.predicted_s, one.low, one.high)
    return PredictionPoint(
        f"{one.where}, {one.engine}", one.predicted_s, one.step_s, verdict=judge(abs(outside) <= BEYOND),
        reason=f"{outside:+z.0f} % beyond the measured interval", truth_low=one.low, truth_high=one.high,
        rival=one.rule_of_thumb_s,
    )  # fmt: skip


def _build_pair_point(one: PredictedStep, other: PredictedStep) -> PredictionPoint:
    what = f"{one.where}, {one.engine} and {other.engine}"
    predicted = _name_faster(one, other, one.predicted_s, other.predicted_s)
    if one.low <= other.high and other.low <= one.high:
        return PredictionPoint(what, predicted, None, verdict="not testable", reason="measured intervals overlap")
    truth = _name_faster(one, other, one.step_s, other.step_s)
    predicted_gap = compute_error_percent(one.predicted_s, other.predicted_s)
    measured_gap = compute_error_percent(one.step_s, other.step_s)
    reason = f"{one.engine} predicted {predicted_gap:+z.1f} %, measured {measured_gap:+z.1f} % against {other.engine}"
    return PredictionPoint(what, predicted, truth, verdict=judge(predicted == truth), reason=reason)


def _name_faster(one: PredictedStep, other: PredictedStep, ours: float, theirs: float) -> str:
    return f"{one.engine if ours < theirs else other.engine} is faster"


def _build_sort_key(one: PredictedStep) -> tuple[str, int]:
    return one.rate, one.nodes


OTHER_RATES = "this host and device are faster or slower than the published numbers of the machine file"
NONE = "No GPU run is recorded yet, so nothing here can be compared."


def compare_gpu_runs(found: Iterable[RunRecord], rehearsed: Iterable[dict[str, str]]) -> list[PredictionComparison]:
    """Return the comparisons of memory and step time for every run among `found` that was measured on GPUs. `rehearsed`
    has a row for each rehearsal of such a run."""
    measured = [run for run in found if run.evidence == "measured" and run.circumstance.machine.device == "cuda"]
    runs = [run for run in measured if _has_fused_bias(run)]
    none = "" if runs else NONE
    rows = {row["config_id"]: row for row in rehearsed}
    return [
        build_comparison("gpu_memory", filter(None, map(_build_peak_point, runs)), none=none),
        *_compare_rehearsed([(run, rows[run.config_id]) for run in runs if run.config_id in rows]),
        build_comparison("gpu_times", filter(None, map(_build_gpu_time_point, runs)), none=none),
    ]


def read_measured_runs(recorded: RecordedRuns) -> Iterator[RunRecord]:
    """Yield the record of every measured run, from all machines."""
    yield from map(read_record, find_records([recorded.measured]))


def _compare_rehearsed(pairs: Sequence[tuple[RunRecord, dict[str, str]]]) -> list[PredictionComparison]:
    """Return two comparisons of runs with their rehearsals by shapes: of the peak bytes in blocks of the caching
    allocator, and of the bytes that it reserved. A pair is a run and the row of its rehearsal."""
    names = {
        "gpu_rehearsed": ("peak_bytes", "peak_allocated_bytes"),
        "gpu_reserved": ("reserved_bytes", "peak_reserved_bytes"),
    }
    found = []
    for name, (column, field) in names.items():
        points = [
            PredictionPoint(_format_run_label(run), float(row[column]), getattr(run.observations.memory[0], field))
            for run, row in pairs if run.observations and run.observations.memory
        ]  # fmt: skip
        found.append(build_comparison(name, points))
    return found


def _has_fused_bias(run: RunRecord) -> bool:
    """Return False if an old version of transformers gave T5 a position bias that no fused attention kernel of a GPU
    accepts. zeroscale requires a later version (pyproject.toml)."""
    installed = (run.environment.versions.get("transformers") if run.environment else None) or ""
    numbers = [int(number) for number in re.findall(r"\d+", installed)[:2]]
    return not numbers or numbers >= [5, 23]


def _build_peak_point(run: RunRecord) -> PredictionPoint | None:
    """Return a point that compares the predicted with the measured peak memory of a run. Return None for a run that
    failed for a reason other than lack of memory."""
    room, observed, label = run.circumstance.machine.memory_bytes, run.observations, _format_run_label(run)
    predicted = predict_memory(run.spec, "cuda", room)
    if run.outcome.kind == "oom":
        right = room is None or not predicted.fits(room)
        return PredictionPoint(label, predicted.peak, "out of memory", verdict=judge(right), reason="predicted to fit")
    if run.outcome.kind != "ok" or observed is None:
        return None
    peaks = [rank.peak_allocated_bytes for rank in observed.memory if rank.peak_allocated_bytes is not None]
    if not peaks:
        return PredictionPoint(label, predicted.peak, None, **NOT_RECORDED)
    rival = estimate_memory(run.spec, observed.parameters)
    return PredictionPoint(label, predicted.peak, max(peaks), rival=rival)


def _build_gpu_time_point(run: RunRecord) -> PredictionPoint | None:
    """Return a point that compares the predicted with the measured median step time of a run. Return None for a run
    without step times."""
    steps, label = run.observations.steps if run.observations else None, _format_run_label(run)
    if run.outcome.kind != "ok" or steps is None:
        return None
    measured = statistics.median(steps.step_s[steps.cut :])
    try:
        predicted = predict_step_time(run.spec, run.circumstance.machine, "cuda").step_s
    except UserError as error:
        return PredictionPoint(label, None, measured, verdict="not testable", reason=str(error))
    return PredictionPoint(label, predicted, measured, reason=OTHER_RATES)


def _format_run_label(run: RunRecord) -> str:
    parameters = run.observations.parameters if run.observations else run.spec.model.parameters or 0
    repeat = run.circumstance.repeat
    return f"{run.circumstance.machine.name}: {format_label(MemoryRun(run.spec, parameters))}, repeat {repeat}"
