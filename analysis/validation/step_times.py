"""Step times of recorded runs beside those predicted: on the testbed at several link rates, and on GPUs."""

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from analysis import results
from analysis.table import list_rows
from analysis.validation import PredictionComparison, PredictionPoint, build_point, compute_error_percent
from analysis.validation.published_memory import estimate_flops, estimate_memory
from analysis.validation.recorded import MemoryRun, RecordedRuns, format_label
from bench.core.errors import UserError
from bench.core.formatting import format_count
from bench.core.machine import Machine
from bench.core.record import RunRecord
from bench.core.spec import RunSpec
from bench.core.store import find_records, read_record
from bench.predict.memory import predict_memory
from bench.predict.step_time import predict_step_time
from bench.predict.step_time.network import change_link_speed
from bench.predict.step_time.rates import read_rates

RATES: dict[str, float] = {"100mbit": 12.5e6, "400mbit": 50e6, "1gbit": 125e6}
"""Link rates of the recorded runs, in bytes/s."""
SLOW, FAST = "100mbit", "1gbit"
"""Where collectives were calibrated. Chosen before anybody had looked at a step time; none was calibrated with."""
STUDY = "step_time"

Place = tuple[str, int]
"""Engine and nodes."""


class PredictedStep(NamedTuple):
    """A configuration at one link rate. Its step in seconds: as measured, the median over allocations with its
    interval; as predicted from rehearsals with its interval, and from calibrated rates alone; by 6·N·tokens at the rate
    of the best product."""

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
        """Whether the step took what was predicted from rehearsals, doubt included."""
        return self.predicted_low <= self.step_s <= self.predicted_high

    @property
    def where(self) -> str:
        """Link rate and nodes, in words."""
        return f"{self.rate}, {format_count(self.nodes, 'node')}"


def predict_steps(recorded: RecordedRuns) -> list[PredictedStep]:
    """Return every recorded configuration, by link rate, engine and nodes."""
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
        by_rehearsal, by_rates = (
            predict_step_time(spec, machine, "cpu", rehearsed_s=s) for s in (computing[place], None)
        )
        predicted = by_rehearsal.step_s, by_rehearsal.low_s, by_rehearsal.high_s
        rule_of_thumb_s = _estimate_step_s(spec, row["parameters"], machine)
        yield PredictedStep(folder.name, *place, *measured, *predicted, by_rates.step_s, rule_of_thumb_s)


def _estimate_step_s(spec: RunSpec, parameters: int, machine: Machine) -> float:
    tokens = spec.batch.micro * spec.accumulation * spec.tokens_per_sample
    best = read_rates(machine.model_dump_json(), spec.precision, "cpu").ceiling
    return estimate_flops(parameters, tokens) / best


def _read_machine(recorded: RecordedRuns, rate: str) -> Machine:
    plain_yaml = (recorded.inputs / f"bed_{rate}.yaml").read_text(encoding="utf-8")
    return Machine.model_validate(yaml.safe_load(plain_yaml))


def _read_rehearsed_seconds(recorded: RecordedRuns) -> dict[Place, float]:
    """Return the seconds that a step computes: the median over rehearsals of one rank alone on the machine."""
    medians: dict[Place, list[float]] = {}
    steps = recorded.runs / STUDY
    for path in find_records([steps / "rehearsals", steps / "rehearsals_again"]):
        record = read_record(path)
        assert record.observations is not None  # all of them ended ok
        place = record.spec.engine.name, record.spec.nodes
        medians.setdefault(place, []).append(statistics.median(record.observations.compute_s))
    return {place: statistics.median(of) for place, of in medians.items()}


MEAN, BEYOND = 10.0, 25.0
"""Percent: bound of the mean error, and of how far a prediction may lie beyond the measured interval."""
INSIDE = (
    " {inside} of {points} steps took what was predicted of them with its doubt, whose width was read off the steps at "
    "the calibrated rates."
)
BLIND = (
    "The tiny T5 in fp32, stages 0–3 on 1 to 4 nodes of `slurm/testbed`, two allocations each, links of 100, 400 and "
    "1000 Mbit/s (`tests/data/studies/step_time.yaml`). At 400 Mbit/s nothing was measured but the steps themselves: "
    "collectives were calibrated (`zeroscale calibrate`) at the other two rates, chosen before anybody had looked at a "
    "step time. What a step computes comes from rehearsals of one rank alone on the machine (the median of three, "
    "after single ones had strayed by up to a third) and the calibrated slowdown of ranks that share a processor; no "
    "step time was calibrated with. The measured interval is the range of two repeats, which holds the median with a "
    "probability of one half. 6·N·tokens: of one rank, at the rate of the best calibrated product. The calibration of "
    "the slowdown was repeated with longer rounds, since its first values were impossible: four ranks on two cores "
    "cannot take less than twice as long. Its last repetition and the third rehearsals were made after a first "
    "comparison had shown outliers: with the calibration before and the first rehearsals alone the mean error at 400 "
    "Mbit/s was 12.8 %, the worst 35 %. What was measured again was chosen by that; no number was." + INSIDE
)
SEEN = "The same at the two rates at which collectives were calibrated." + INSIDE
ALL = "All of them, computing by calibrated rates of products, attention and memory alone."
STAGE_3 = (
    "Stage 3 gathers and releases weights around every module in Python, which costs time that no rate of products, "
    "attention and memory holds: it is predicted a quarter to a third too fast where links are not what it waits for. "
    "A rehearsal pays it, and so do the tables above."
)
CLOSE = (
    "What is wrong are pairs whose times are close, closer than the errors of the times predicted: each row says by "
    "how much. With two repeats the measured intervals are ranges that hold the median with a probability of one half."
)
ORDER = (
    "Each pair of engines at each link rate and node count of the two tables above: which takes less time per step, "
    "where the measured intervals do not overlap."
)


def compare_testbed(recorded: RecordedRuns) -> list[PredictionComparison]:
    """Return the step times, first at the link rate that was not calibrated, and the order of the stages."""
    found = predict_steps(recorded)
    calibrated = [one for one in found if one.rate in (SLOW, FAST)]
    blind = [one for one in found if one.rate not in (SLOW, FAST)]
    by_rates = [one._replace(predicted_s=one.by_rates_s) for one in found]
    return [
        _compare_times("step_times_blind", "at a link rate that was not calibrated", blind, BLIND),
        _compare_times("step_times", "at link rates that were calibrated", calibrated, SEEN),
        _compare_times("step_times_by_rates", "without a rehearsal", by_rates, ALL)._replace(why=STAGE_3),
        PredictionComparison(
            "stage_order", "Testbed: the order of the stages", ORDER, tuple(list_order_points(found)),
            bound="right wherever measured intervals do not overlap", why=CLOSE,
        ),
    ]  # fmt: skip


def compute_distance_percent(predicted: float, low: float, high: float) -> float:
    """Return how far a value lies beyond an interval, signed, in percent of its nearer end; 0 inside."""
    return compute_error_percent(predicted, min(max(predicted, low), high))


def list_order_points(found: Sequence[PredictedStep]) -> Iterator[PredictionPoint]:
    """Yield each pair of engines at one link rate and node count: which is faster, where measured intervals tell."""
    for _, members in itertools.groupby(sorted(found, key=_build_sort_key), key=_build_sort_key):
        for one, other in itertools.combinations(members, 2):
            yield _build_pair_point(one, other)


def _compare_times(name: str, title: str, found: Sequence[PredictedStep], text: str) -> PredictionComparison:
    text = text.format(inside=sum(one.inside for one in found), points=len(found))
    bound = f"mean {MEAN:g} %; none more than {BEYOND:g} % beyond the measured interval"
    return PredictionComparison(
        name, f"Testbed: step time {title}", text, tuple(map(_build_time_point, found)), "s", mean=MEAN, bound=bound,
        rival="6·N·tokens",
    )  # fmt: skip


def _build_time_point(one: PredictedStep) -> PredictionPoint:
    outside = compute_distance_percent(one.predicted_s, one.low, one.high)
    right = abs(outside) <= BEYOND
    return PredictionPoint(
        f"{one.where}, {one.engine}", one.predicted_s, one.step_s, compute_error_percent(one.predicted_s, one.step_s),
        "ok" if right else "exception", "" if right else f"{outside:+z.0f} % beyond the measured interval",
        one.low, one.high, one.rule_of_thumb_s, compute_error_percent(one.rule_of_thumb_s, one.step_s),
    )  # fmt: skip


def _build_pair_point(one: PredictedStep, other: PredictedStep) -> PredictionPoint:
    what = f"{one.where}, {one.engine} and {other.engine}"
    predicted = _name_faster(one, other, one.predicted_s, other.predicted_s)
    if one.low <= other.high and other.low <= one.high:
        return PredictionPoint(what, predicted, None, verdict="not testable", reason="measured intervals overlap")
    truth = _name_faster(one, other, one.step_s, other.step_s)
    if predicted == truth:
        return PredictionPoint(what, predicted, truth)
    predicted_gap, measured_gap = (
        compute_error_percent(one.predicted_s, other.predicted_s),
        compute_error_percent(one.step_s, other.step_s),
    )
    reason = f"{one.engine} predicted {predicted_gap:+z.1f} %, measured {measured_gap:+z.1f} % beside {other.engine}"
    return PredictionPoint(what, predicted, truth, verdict="exception", reason=reason)


def _name_faster(one: PredictedStep, other: PredictedStep, ours: float, theirs: float) -> str:
    return f"{one.engine if ours < theirs else other.engine} is faster"


def _build_sort_key(one: PredictedStep) -> tuple[str, int]:
    return one.rate, one.nodes


MEMORY, TIME = 5.0, 10.0
"""Percent of every point; bounds set before any GPU was seen."""
GPU_MEMORY_TEXT = (
    "Records in `results/measured` that were made on GPUs: the allocator's peak over steady steps, of the rank that "
    "has most. A run that ended out of memory is right if it was not predicted to fit for sure."
)
GPU_TIME_TEXT = "The median step of the same runs, beside what the machine's published numbers say of it."
NONE = "No GPU run is recorded yet, so nothing here can be compared."


def compare_gpu_runs(found: Iterable[RunRecord]) -> list[PredictionComparison]:
    """Return memory and time of every run among `found` that was measured on GPUs."""
    runs = [run for run in found if run.evidence == "measured" and run.circumstance.machine.device == "cuda"]
    text, text_time = (f"{text_part} {'' if runs else NONE}".rstrip() for text_part in (GPU_MEMORY_TEXT, GPU_TIME_TEXT))
    peaks = tuple(point for run in runs if (point := _build_peak_point(run)))
    times = tuple(point for run in runs if (point := _build_gpu_time_point(run)))
    return [
        PredictionComparison(
            "gpu_memory", "Runs on GPUs: peak over steady steps", text, peaks, "bytes", each=MEMORY,
            rival="DeepSpeed's estimator",
        ),
        PredictionComparison("gpu_times", "Runs on GPUs: step time", text_time, times, "s", each=TIME),
    ]  # fmt: skip


def read_measured_runs(recorded: RecordedRuns) -> Iterator[RunRecord]:
    """Yield every run that was measured, on whatever machine."""
    yield from map(read_record, find_records([recorded.measured]))


def _build_peak_point(run: RunRecord) -> PredictionPoint | None:
    """Return a run's peak as a point; None for one that says nothing of memory."""
    predicted = predict_memory(run.spec, "cuda", run.circumstance.machine.memory_bytes)
    observed = run.observations
    if run.outcome.kind == "oom":
        room = run.circumstance.machine.memory_bytes
        wrong = room is not None and predicted.fits(room) is True
        reason = "predicted to fit" if wrong else ""
        return PredictionPoint(
            _format_run_label(run),
            predicted.peak,
            "out of memory",
            verdict="exception" if wrong else "ok",
            reason=reason,
        )
    if run.outcome.kind != "ok" or observed is None:
        return None
    peaks = [rank.peak_allocated_bytes for rank in observed.memory if rank.peak_allocated_bytes is not None]
    if not peaks:
        return PredictionPoint(
            _format_run_label(run), predicted.peak, None, verdict="not testable", reason="not recorded"
        )
    said = estimate_memory(run.spec, observed.parameters)
    return build_point(_format_run_label(run), predicted.peak, max(peaks), MEMORY, said)


def _build_gpu_time_point(run: RunRecord) -> PredictionPoint | None:
    """Return a run's median step as a point; None for one that was not timed."""
    steps = run.observations.steps if run.observations else None
    if run.outcome.kind != "ok" or steps is None:
        return None
    measured = statistics.median(steps.step_s[steps.cut :])
    try:
        predicted = predict_step_time(run.spec, run.circumstance.machine, "cuda").step_s
    except UserError as error:
        return PredictionPoint(_format_run_label(run), None, measured, verdict="not testable", reason=str(error))
    return build_point(_format_run_label(run), predicted, measured, TIME)


def _format_run_label(run: RunRecord) -> str:
    parameters = run.observations.parameters if run.observations else run.spec.model.parameters or 0
    repeat = run.circumstance.repeat
    return f"{run.circumstance.machine.name}: {format_label(MemoryRun(run.spec, parameters))}, repeat {repeat}"
