"""GPT of 175 billion parameters on Frontier: the memory of each stage and the step in its public log, beside what is
predicted of them and what a rehearsal takes."""

from collections.abc import Sequence

from analysis.claims.published import read
from analysis.predictions import PredictionComparison, PredictionPoint, build_point, compute_error_percent
from analysis.predictions.published_runs import (
    DEVICES,
    PublishedRun,
    build_frontier_run,
    build_machine,
    count_megatron_flops,
)
from analysis.predictions.recorded import RecordedRuns
from bench.predict.memory import MemoryPrediction, predict_memory_by_place
from bench.spec import RunSpec

MEMORY_MEAN, REHEARSED_EACH = 5.0, 3.0
"""Bounds: of the mean error of memory beside the log, and of each error beside a rehearsal, in percent."""
MEMORY = (
    "GPT of 175 billion parameters on 128 dies of MI250X, tensor 4, pipeline 16, data 2: the peak of each stage that "
    "Megatron-DeepSpeed printed (`results/published/frontier_memory.csv`). No constant was chosen on this source. "
    "Predicted is engine `pipeline`, in forward and backward, for no update was ever made there. It keeps a stage's "
    "gradients whole between two steps where DeepSpeed's stage 1 divides them between the copies: a byte more for each "
    "parameter, {more:,.0f} MiB in the middle, where it holds {ours:,.0f} MiB between two steps and the log says "
    "{theirs:,.0f}. Without that byte it would be {least:.1f} to {most:.1f} % off. Dropout of 0.1 is assumed."
)
REHEARSED = (
    "The same peaks beside a rank of each stage as it is rehearsed by its shapes (`inputs/rehearsed_frontier.csv`, "
    "`zeroscale rehearse … --shapes-only`): engine `pipeline` itself, in bf16, whose slices have no dropout. Here the "
    "rehearsal is the prediction; the byte more for each parameter is in it too."
)
PREDICTED = (
    "What those rehearsed ranks hold between two steps, at the peak of the passes, and at that of a whole step with "
    "its update, beside what is predicted of them."
)
LOG = (
    "The step of the same run (`results/published/frontier_log.csv`), by the same rates as above. It is excluded from "
    "every error and interval, for the reason stated with it."
)
EXCLUDED = (
    "the log's step of {step:g} s: by Megatron's count of FLOPs it asks {rate:.0f} TFLOP/s of a die, more than the "
    "best product that was published for this device, {best:g} in bf16, and twice the share of the peak in the paper"
)
_MIB = 2**20
_BYTES_PER_PARAMETER = 10
"""Between two steps of engine `pipeline` with two copies: weights 2, gradients 2, master weights and moments 12 / 2."""


def compare(recorded: RecordedRuns) -> list[PredictionComparison]:
    """Return the memory, predicted and rehearsed, and the step."""
    machine = build_machine("MI250X-GCD")
    (row,) = read("frontier_log").rows
    run, rehearsed = build_frontier_run(row, machine), recorded.table("rehearsed_frontier")
    return [
        _compare_memory(predict_memory_by_place(run.spec, "cuda")),
        PredictionComparison(
            "frontier_rehearsed", "GPT on Frontier: memory of each stage, rehearsed", REHEARSED,
            _build_stage_points([float(stage["passes_peak_bytes"]) for stage in rehearsed]), "bytes", mean=MEMORY_MEAN,
        ),
        PredictionComparison(
            "frontier_rehearsal", "GPT on Frontier: what is rehearsed", PREDICTED,
            _build_rehearsal_points(rehearsed), "bytes", each=REHEARSED_EACH,
        ),
        _exclude_step(run, row, machine.matmul_ceiling_tflops["bf16"]),
    ]  # fmt: skip


def _compare_memory(places: Sequence[MemoryPrediction]) -> PredictionComparison:
    stages, middle = read("frontier_memory").rows, places[1].resident / _MIB
    more, peaks = middle / _BYTES_PER_PARAMETER, [_count_passes_peak(place) for place in places]
    without = [point.error or 0.0 for point in _build_stage_points([peak - more * _MIB for peak in peaks])]
    text = MEMORY.format(
        more=more, ours=middle, theirs=float(stages[1]["allocated_mib"]), least=min(without), most=max(without)
    )
    title = "GPT on Frontier: memory of each stage"
    return PredictionComparison("frontier_memory", title, text, _build_stage_points(peaks), "bytes", mean=MEMORY_MEAN)


def _count_passes_peak(place: MemoryPrediction) -> int:
    """Return the bytes at the peak of forward and backward."""
    return max(phase.total for phase in place.phases if phase.name in ("forward", "backward"))


def _build_stage_points(peaks: Sequence[float]) -> tuple[PredictionPoint, ...]:
    """Return the peaks of the stages beside those in the log."""
    stages = [(f"stage {row['stage']}", _MIB * float(row["peak_mib"])) for row in read("frontier_memory").rows]
    return tuple(
        PredictionPoint(what, peak, truth, compute_error_percent(peak, truth))
        for (what, truth), peak in zip(stages, peaks, strict=True)
    )


def _build_rehearsal_points(rehearsed: Sequence[dict[str, str]]) -> tuple[PredictionPoint, ...]:
    points = []
    places = predict_memory_by_place(RunSpec.model_validate_json(rehearsed[0]["spec"]), "cpu", rehearsed=True)
    for row, place in zip(rehearsed, places, strict=True):
        step = max(phase.total for phase in place.phases if phase.name != "initialisation")
        found = (
            ("between steps", place.resident, row["resident_bytes"]),
            ("passes", _count_passes_peak(place), row["passes_peak_bytes"]),
            ("step", step, row["peak_bytes"]),
        )
        points += [
            build_point(f"stage {row['stage']}: {what}", predicted, int(seen), REHEARSED_EACH)
            for what, predicted, seen in found
        ]
    return tuple(points)


def _exclude_step(run: PublishedRun, row: dict[str, str], best: float) -> PredictionComparison:
    step_s = float(row["step_s"])
    rate = count_megatron_flops(row) / (int(row["nodes"]) * DEVICES) / step_s / 1e12
    reason = EXCLUDED.format(step=step_s, rate=rate, best=best)
    point = PredictionPoint(run.what, run.predict().step_s, step_s, verdict="not testable", reason=reason)
    return PredictionComparison("frontier_log", "GPT on Frontier: a step, excluded", LOG, (point,), "s")
