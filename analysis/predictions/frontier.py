"""GPT on Frontier: the share of the devices' peak and how it scales, beside predictions from published numbers."""

from analysis.claims.published import read
from analysis.predictions import PredictionComparison, PredictionPoint, compute_error_percent
from analysis.predictions.published_runs import (
    DEVICES,
    build_burst_machine,
    build_frontier_run,
    build_machine,
    count_megatron_flops,
)

MEAN, POINTS = 9.0, 5.0
"""Bounds: of the mean error of the shares in percent, and of every efficiency in points."""
PEAK = (
    "GPT of 22, 175 and 1,000 billion parameters on MI250X (`results/published/frontier_gpt.csv`): FLOPs with "
    "recomputation, as Megatron counts them, over the devices' peak. No constant was chosen on this source. That the "
    "published shares are of the layouts in the authors' scripts is assumed. {inside} of 3 lie in the predicted "
    "interval. The sustained rate of products, 88 TFLOP/s in bf16 and 92 in fp16, was chosen on Databricks' two steps "
    "of MPT-7B on MI250. At the rates of the best products, 147 and 0.8 of the peak, {shares} % would be predicted. "
    "The class of software is `usual`."
)
PEAK_WHY = (
    "Tiles and attention are predicted as on an A100, and one rate chosen on another model stands for all products. "
    "Calibrate such a machine (`zeroscale calibrate`) before you rely on times."
)
SCALING = (
    "The same layouts on more nodes (`results/published/frontier_scaling.csv`), each with as many samples for a copy "
    "of the model (weak) or as many in all (strong): how much of the throughput per device is left. Where it began, "
    "and with how many samples, is assumed. No constant was chosen on this source."
)
SCALING_WHY = "Collectives are predicted as on idle links: what jobs beside it and many switches take is in no number."


def compare() -> list[PredictionComparison]:
    """Return the shares of the peak, and the efficiencies."""
    machine = build_machine("MI250X-GCD")
    rows = {row["model"]: row for row in read("frontier_gpt").rows}
    peak = machine.peak_tflops["fp16"] * 1e12
    burst = build_burst_machine("MI250X-GCD")
    points, inside, shares = [], 0, []
    for row in rows.values():
        run = build_frontier_run(row, machine)
        found, truth = run.predict(), float(row["percent_of_peak"])
        total = 100 * count_megatron_flops(row) / (int(row["nodes"]) * DEVICES * peak)
        shares.append(total / build_frontier_run(row, burst).predict().step_s)
        right = total / found.high_s <= truth <= total / found.low_s
        inside += right
        predicted = total / found.step_s
        points.append(PredictionPoint(
            run.what, predicted, truth, compute_error_percent(predicted, truth), "ok" if right else "exception",
            "" if right else "outside of the predicted interval",
        ))  # fmt: skip
    text = PEAK.format(inside=inside, shares=", ".join(f"{share:.1f}" for share in shares))
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
