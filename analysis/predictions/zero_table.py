"""ZeRO's Table 1 beside the arithmetic of model states that figures show (`bench.engine_facts.Division`)."""

from collections.abc import Iterator
from decimal import ROUND_DOWN, ROUND_HALF_UP, Decimal

from analysis.claims.published import read
from analysis.predictions import PredictionComparison, PredictionPoint, compute_error_percent, estimators
from bench.engine_facts import Division
from bench.formatting import format_count

STAGES = (1, 2, 3)
GB = 10**9

TEXT = (
    "Bytes of weights, gradients and Adam's state per device, against the 54 printed cells of Table 1 of ZeRO (arXiv "
    "1910.02054; `results/published/zero_memory_table.csv`). Some cells are rounded there and some cut off: a cell is "
    "right if its digits are those of the prediction by one of the two. DeepSpeed's estimators count 18 bytes per "
    "parameter where the paper has 14 or 16; stage 3's is given no largest layer, for the table has no layers."
)


def compare() -> PredictionComparison:
    """Return every printed cell."""
    return PredictionComparison(
        "zero_table", "ZeRO's own table", TEXT, tuple(_list_points()), unit="GB", bound="the printed digits",
        rival="DeepSpeed's estimator",
    )  # fmt: skip


def is_printed_form(printed: str, exact: Decimal) -> bool:
    """Whether `printed` is `exact` rounded, or cut off, to as many digits."""
    return Decimal(printed) in {exact.quantize(Decimal(printed), how) for how in (ROUND_HALF_UP, ROUND_DOWN)}


def _list_points() -> Iterator[PredictionPoint]:
    for row in read("zero_memory_table").rows:
        elements, ranks = round(float(row["parameters_b"]) * GB), int(row["data_parallel"])
        for stage in STAGES:
            yield _build_cell_point(row["parameters_b"], elements, ranks, stage, row[f"stage{stage}_gb"])


def _build_cell_point(billions: str, elements: int, ranks: int, stage: int, printed: str) -> PredictionPoint:
    weights, gradients, optimizer = (ranks if stage >= first else 1 for first in (3, 2, 1))
    exact = Decimal(Division(weights, gradients, optimizer).state_bytes(elements, "bf16")) / GB
    what = f"{billions}B parameters, stage {stage}, {format_count(ranks, 'device')}"
    said = _estimate_gb(elements, ranks, stage)
    truth = float(printed)
    good = is_printed_form(printed, exact)
    return PredictionPoint(
        what, float(exact), truth, compute_error_percent(float(exact), truth), "ok" if good else "exception",
        rival=said, rival_error=None if said is None else compute_error_percent(said, truth),
    )  # fmt: skip


def _estimate_gb(elements: int, ranks: int, stage: int) -> float | None:
    if stage == 2:
        return estimators.estimate_zero2(elements, ranks, offload=False) / GB
    if stage == 3:
        return estimators.estimate_zero3(elements, 0, ranks, offload=False, offload_weights=False) / GB
    return None
