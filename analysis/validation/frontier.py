"""GPT on the Frontier supercomputer compared with predictions: share of the peak, scaling efficiency, and memory and
step time in a published log."""

from collections.abc import Sequence

from analysis.claims.sources import read_published
from analysis.validation import (
    OUTSIDE,
    PredictionComparison,
    PredictionPoint,
    build_comparison,
    judge,
    judge_point,
)
from analysis.validation.published_runs import (
    DEVICES,
    build_burst_machine,
    build_frontier_run,
    build_machine,
    count_megatron_flops,
)
from analysis.validation.recorded import RecordedRuns
from bench.core.machine import Machine
from bench.core.spec import RunSpec
from bench.predict.memory import MemoryPrediction, predict_memory_by_place

ACCELERATOR = "MI250X-GCD"
EXCLUDED = (
    "the log's step of {step:g} s: by Megatron's count of FLOPs it needs {rate:.0f} TFLOP/s of a die, more than the "
    "best product published for this device, {best:g} in bf16, and twice the share of the peak in the paper"
)
_MIB = 2**20
_BYTES_PER_PARAMETER = 10
"""Bytes per parameter between two steps of the engine `pipeline` with two copies of the model: 2 for weights, 2 for
gradients, and 6 for optimizer states (12 bytes of master weights and moments, divided between the two copies)."""


def compare_scaling() -> list[PredictionComparison]:
    """Return two comparisons of predicted with published values. The first is of the FLOP rate in percent of the
    devices' peak, the second of the scaling efficiency."""
    machine, burst = build_machine(ACCELERATOR), build_burst_machine(ACCELERATOR)
    rows = {row["model"]: row for row in read_published("frontier_gpt").rows}
    peak = machine.peak_tflops["fp16"] * 1e12
    points, shares = [], []
    for row in rows.values():
        run = build_frontier_run(row, machine)
        found, truth = run.predict(), float(row["percent_of_peak"])
        total = 100 * count_megatron_flops(row) / (int(row["nodes"]) * DEVICES * peak)
        shares.append(total / build_frontier_run(row, burst).predict().step_s)
        inside = total / found.high_s <= truth <= total / found.low_s
        points.append(PredictionPoint(run.what, total / found.step_s, truth, verdict=judge(inside), reason=OUTSIDE))
    count, burst_shares = sum(one.verdict == "ok" for one in points), ", ".join(f"{share:.1f}" for share in shares)
    published = read_published("frontier_scaling").rows
    efficiencies = [_build_efficiency_point(row, rows[row["model"]], machine) for row in published]
    peaks = build_comparison("frontier_peak", points, inside=count, shares=burst_shares)
    return [peaks, build_comparison("frontier_scaling", efficiencies)]


def _build_efficiency_point(row: dict[str, str], layout: dict[str, str], machine: Machine) -> PredictionPoint:
    nodes, first, samples = (int(row[name]) for name in ("nodes", "nodes_at_first", "global_batch"))
    at_first = samples * first // nodes if row["scaling"] == "weak" else samples
    rates = [
        build_frontier_run(layout, machine, count, batch).predict().tokens_per_s / count
        for count, batch in ((first, at_first), (nodes, samples))
    ]
    what, truth = f"{row['model']}, {row['scaling']}, {first} to {nodes} nodes", float(row["efficiency_percent"])
    return PredictionPoint(what, 100 * rates[1] / rates[0], truth, reason="more than the bound")


def compare_log(recorded: RecordedRuns) -> list[PredictionComparison]:
    """Return four comparisons. The published log is compared with predicted memory, with the memory of rehearsals
    (which run one rank alone), and with the predicted step time. The memory of the rehearsals is also compared with
    predictions."""
    machine = build_machine(ACCELERATOR)
    (row,) = read_published("frontier_log").rows
    run, rehearsed = build_frontier_run(row, machine), recorded.table("rehearsed_frontier")
    step_s = float(row["step_s"])
    rate = count_megatron_flops(row) / (int(row["nodes"]) * DEVICES) / step_s / 1e12
    reason = EXCLUDED.format(step=step_s, rate=rate, best=machine.matmul_ceiling_tflops["bf16"])
    step = PredictionPoint(run.what, run.predict().step_s, step_s, verdict="not testable", reason=reason)
    peaks = [float(stage["passes_peak_bytes"]) for stage in rehearsed]
    return [
        _compare_memory(predict_memory_by_place(run.spec, "cuda")),
        build_comparison("frontier_rehearsed", _build_stage_points(peaks)),
        build_comparison("frontier_rehearsal", _build_rehearsal_points(rehearsed)),
        build_comparison("frontier_log", [step]),
    ]


def _compare_memory(places: Sequence[MemoryPrediction]) -> PredictionComparison:
    stages, middle = read_published("frontier_memory").rows, places[1].resident / _MIB
    more, peaks = middle / _BYTES_PER_PARAMETER, [_count_passes_peak(place) for place in places]
    reduced = _build_stage_points([peak - more * _MIB for peak in peaks])
    without = [judge_point(point, None).error or 0.0 for point in reduced]
    numbers = {"more": more, "ours": middle, "theirs": float(stages[1]["allocated_mib"])}
    points = _build_stage_points(peaks)
    return build_comparison("frontier_memory", points, least=min(without), most=max(without), **numbers)


def _count_passes_peak(place: MemoryPrediction) -> int:
    """Return the peak bytes of the forward pass or of the backward pass, whichever is higher."""
    return max(phase.total for phase in place.phases if phase.name in ("forward", "backward"))


def _build_stage_points(peaks: Sequence[float]) -> list[PredictionPoint]:
    """Return a point for each pipeline stage, which compares the stage's peak memory in bytes with the peak in the
    published log."""
    rows = read_published("frontier_memory").rows
    return [
        PredictionPoint(f"stage {row['stage']}", peak, _MIB * float(row["peak_mib"]))
        for row, peak in zip(rows, peaks, strict=True)
    ]


def _build_rehearsal_points(rehearsed: Sequence[dict[str, str]]) -> list[PredictionPoint]:
    points = []
    places = predict_memory_by_place(RunSpec.model_validate_json(rehearsed[0]["spec"]), "cpu", rehearsed=True)
    for row, place in zip(rehearsed, places, strict=True):
        step = max(phase.total for phase in place.phases if phase.name != "initialisation")
        found = {
            "between steps": (place.resident, row["resident_bytes"]),
            "passes": (_count_passes_peak(place), row["passes_peak_bytes"]),
            "step": (step, row["peak_bytes"]),
        }
        points += [
            PredictionPoint(f"stage {row['stage']}: {what}", predicted, int(seen))
            for what, (predicted, seen) in found.items()
        ]
    return points
