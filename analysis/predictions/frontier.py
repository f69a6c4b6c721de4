"""GPT on Frontier: the share of the devices' peak and how it scales, beside predictions from published numbers."""

from analysis.claims.published import read
from analysis.predictions import PredictionComparison, PredictionPoint, compute_error_percent
from analysis.predictions.published_runs import DEVICES, build_frontier_run, build_machine, count_megatron_flops
from bench.machine import Machine
from bench.predict.memory import predict_memory_by_place

MEAN, POINTS = 9.0, 5.0
"""Bounds: of the mean error of the shares in percent, and of every efficiency in points."""
PEAK = (
    "GPT of 22, 175 and 1,000 billion parameters on MI250X (`results/published/frontier_gpt.csv`): FLOPs with "
    "recomputation, as Megatron counts them, over the devices' peak. No constant was chosen on this source. That the "
    "published shares are of the layouts in the authors' scripts is assumed. {inside} of 3 lie in the predicted "
    "interval. Predicted are the rates of an A100 at this device's peak, memory and links: tiles and waves, and the "
    "best product that was published, 147 TFLOP/s in bf16, and 0.8 of the peak for fp16, of which nobody published it. "
    "Beside the 147 somebody else reports {lower:g} (ml-engineering, issue 76): with those in both precisions "
    "{shares} % would be predicted."
)
LOWER_TFLOPS = 127.0
"""The lower of two published rates of the best product."""
PEAK_WHY = (
    "An MI250X reaches far less of its peak than an A100 does, and its best product is only a part of that: what other "
    "shapes reach, attention, and both dies at once nobody published. Calibrate such a machine "
    "(`zeroscale calibrate`) before you rely on times."
)
SCALING = (
    "The same layouts on more nodes (`results/published/frontier_scaling.csv`), each with as many samples for a copy "
    "of the model (weak) or as many in all (strong): how much of the throughput per device is left. Where it began, "
    "and with how many samples, is assumed. No constant was chosen on this source."
)
SCALING_WHY = "Collectives are predicted as on idle links: what jobs beside it and many switches take is in no number."

MEMORY = (
    "GPT of 175 billion parameters on 128 dies of MI250X, tensor 4, pipeline 16, data 2: the peak of each stage that "
    "Megatron-DeepSpeed printed (`results/published/frontier_memory.csv`). No constant was chosen on this source. "
    "Predicted is engine `pipeline`, in forward and backward, for no update was ever made there. It keeps a stage's "
    "gradients whole between two steps where DeepSpeed's stage 1 divides them between the copies: a byte more for each "
    "parameter, {more:,.0f} MiB in the middle, where it holds {ours:,.0f} MiB between two steps and the log says "
    "{theirs:,.0f}. Without that byte it would be {least:.1f} to {most:.1f} % off."
)
MEMORY_MEAN = 5.0
"""Bound of the mean error of memory in percent."""
_MIB = 2**20
_PASSES = ("forward", "backward")
_BYTES_PER_PARAMETER = 10
"""Between two steps of engine `pipeline` with two copies: weights 2, gradients 2, master weights and moments 12 / 2."""
LOG = (
    "The step of the same run (`results/published/frontier_log.csv`), by the same rates as above. At 149 TFLOP/s by "
    "Megatron's count of FLOPs it is faster than the best product that was published for this device, {best:g} in bf16."
)


def compare() -> list[PredictionComparison]:
    """Return the shares of the peak, the efficiencies, and the memory and step of the run whose log is public."""
    machine = build_machine("MI250X-GCD")
    rows = {row["model"]: row for row in read("frontier_gpt").rows}
    peak = machine.peak_tflops["fp16"] * 1e12
    lower = machine.model_copy(update={"matmul_ceiling_tflops": dict.fromkeys(("bf16", "fp16"), LOWER_TFLOPS)})
    points, inside, shares = [], 0, []
    for row in rows.values():
        run = build_frontier_run(row, machine)
        found, truth = run.predict(), float(row["percent_of_peak"])
        total = 100 * count_megatron_flops(row) / (int(row["nodes"]) * DEVICES * peak)
        shares.append(total / build_frontier_run(row, lower).predict().step_s)
        right = total / found.high_s <= truth <= total / found.low_s
        inside += right
        predicted = total / found.step_s
        points.append(PredictionPoint(
            run.what, predicted, truth, compute_error_percent(predicted, truth), "ok" if right else "exception",
            "" if right else "outside of the predicted interval",
        ))  # fmt: skip
    text = PEAK.format(inside=inside, lower=LOWER_TFLOPS, shares=", ".join(f"{share:.1f}" for share in shares))
    return [
        PredictionComparison(
            "frontier_peak", "GPT on Frontier: share of the peak", text, tuple(points), "%",
            mean=MEAN, excused=True, why=PEAK_WHY,
        ),
        PredictionComparison(
            "frontier_scaling", "GPT on Frontier: efficiency of scaling", SCALING,
            tuple(_build_efficiency_point(row, rows[row["model"]]) for row in read("frontier_scaling").rows), "%",
            "points", each=POINTS, why=SCALING_WHY,
        ),
        *_compare_with_log(machine),
    ]  # fmt: skip


def _compare_with_log(machine: Machine) -> list[PredictionComparison]:
    (row,) = read("frontier_log").rows
    run, stages = build_frontier_run(row, machine), read("frontier_memory").rows
    places = predict_memory_by_place(run.spec, "cuda")
    peaks = [max(phase.total for phase in place.phases if phase.name in _PASSES) / _MIB for place in places]
    truths = [float(stage["peak_mib"]) for stage in stages]
    more = places[1].resident / _MIB / _BYTES_PER_PARAMETER
    without = [compute_error_percent(peak - more, truth) for peak, truth in zip(peaks, truths, strict=True)]
    text = MEMORY.format(
        more=more, ours=places[1].resident / _MIB, theirs=float(stages[1]["allocated_mib"]), least=min(without),
        most=max(without),
    )  # fmt: skip
    points = tuple(
        PredictionPoint(f"stage {stage['stage']}", _MIB * peak, _MIB * truth, compute_error_percent(peak, truth))
        for stage, peak, truth in zip(stages, peaks, truths, strict=True)
    )
    found, truth = run.predict(), float(row["step_s"])
    right = found.low_s <= truth <= found.high_s
    step = PredictionPoint(
        run.what, found.step_s, truth, compute_error_percent(found.step_s, truth), "ok" if right else "exception",
        "" if right else "outside of the predicted interval",
    )  # fmt: skip
    best = machine.matmul_ceiling_tflops["bf16"]
    return [
        PredictionComparison(
            "frontier_memory", "GPT on Frontier: memory of each stage", text, points, "bytes", mean=MEMORY_MEAN
        ),
        PredictionComparison(
            "frontier_log", "GPT on Frontier: a step", LOG.format(best=best), (step,), "s", mean=MEAN, excused=True,
            why=PEAK_WHY,
        ),
    ]  # fmt: skip


def _build_efficiency_point(row: dict[str, str], layout: dict[str, str]) -> PredictionPoint:
    machine = build_machine("MI250X-GCD")
    nodes, first, samples = (int(row[name]) for name in ("nodes", "nodes_at_first", "global_batch"))
    at_first = samples * first // nodes if row["scaling"] == "weak" else samples
    rates = [
        build_frontier_run(layout, machine, count, batch).predict().tokens_per_s / count
        for count, batch in ((first, at_first), (nodes, samples))
    ]
    predicted, truth = 100 * rates[1] / rates[0], float(row["efficiency_percent"])
    right = abs(predicted - truth) <= POINTS
    return PredictionPoint(
        f"{row['model']}, {row['scaling']}, {first} to {nodes} nodes", predicted, truth, predicted - truth,
        "ok" if right else "exception", "" if right else "more than the bound",
    )  # fmt: skip
