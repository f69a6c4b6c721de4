"""Published memory and step times of LoRA and QLoRA compared with predictions.

`results/published/adapters.csv` names the sources. No constant of the predictions was fitted to any of them. Three
sources, torchtune, Unsloth and fsdp_qlora, are also held out: they were selected before any of these predictions was
computed.
"""

import itertools
import math

from analysis.claims.sources import read_published
from analysis.validation import PredictionComparison, PredictionPoint, build_comparison, judge
from analysis.validation.published_memory import FITS
from analysis.validation.published_steps import build_question
from analysis.validation.recorded import RecordedRuns
from bench.core.engine_costs import CUDA_BASE_BYTES
from bench.predict.memory import MemoryPrediction, predict_memory
from bench.predict.step_time import predict_step_time

DEVICE_BYTES = {"A100-SXM4-40GB": 42_500_000_000}
_MEMORY = ("allocated", "reserved", "device", "memory")

Row = dict[str, str]


def compare(recorded: RecordedRuns) -> list[PredictionComparison]:
    """Return comparisons of predicted memory and step times of adapters with published values. The memory of held-out
    sources, on which no constant was chosen, has a comparison of its own. Memory is also compared with rehearsals."""
    rows = read_published("adapters").rows
    memory = [row for row in rows if row["quantity"] in _MEMORY]
    groups = {
        "adapters_memory_aside": [row for row in memory if row["aside"] == "true"],
        "adapters_memory": [row for row in memory if row["aside"] == "false"],
        "adapters_fits": [row for row in rows if row["quantity"] == "fits"],
        "adapters_times_aside": [row for row in rows if row["quantity"] == "time"],
    }
    found = [build_comparison(name, map(_build_point, members)) for name, members in groups.items()]
    rehearsed = {row["overrides"]: row for row in recorded.table("rehearsed_adapters")}
    pairs = [(row, rehearsed[row["overrides"]]) for row in memory if row["overrides"] in rehearsed]
    return [*found, build_comparison("adapters_rehearsed", itertools.starmap(_build_rehearsed_point, pairs))]


def _build_point(row: Row) -> PredictionPoint:
    what, note, quantity = f"{row['source']}: {row['what']}", row["note"], row["quantity"]
    if row["not_testable"]:
        known = float(row["truth"]) if row["truth"] else None
        return PredictionPoint(what, None, known, verdict="not testable", reason=row["not_testable"])
    spec, machine = build_question(row["overrides"])
    if quantity == "fits":
        room, fitted = DEVICE_BYTES[row["unit"]], row["truth"] == "true"
        fits = predict_memory(spec, "cuda", room).fits(room)
        return PredictionPoint(what, FITS[fits], FITS[fitted], verdict=judge(fits is fitted), reason=note)
    truth = float(row["truth"])
    if quantity == "time":
        found = predict_step_time(spec, machine)
        inside = found.low_s <= truth <= found.high_s
        return PredictionPoint(what, found.step_s, truth, verdict=judge(inside), reason=note)
    return PredictionPoint(what, _find_quantity(quantity, predict_memory(spec)), truth, reason=note)


def _build_rehearsed_point(row: Row, rehearsed: Row) -> PredictionPoint:
    """Return a point that compares published bytes with those of a rehearsal by shapes. The allocator reserves at most
    what CUDA and its libraries leave of a GPU's memory."""
    peak = float(rehearsed["peak_bytes"])
    if row["quantity"] == "reserved":
        room = build_question(row["overrides"])[1].memory_bytes
        left = math.inf if room is None else room - sum(CUDA_BASE_BYTES) / 2
        peak = min(float(rehearsed["reserved_bytes"]), max(left, float(rehearsed["least_reserved_bytes"])))
    return PredictionPoint(f"{row['source']}: {row['what']}", peak, float(row["truth"]), reason=row["note"])


def _find_quantity(quantity: str, found: MemoryPrediction) -> float:
    """Return the predicted bytes of the quantity that a source reports: bytes of tensors ("allocated"), of torch's
    allocator ("reserved"), or of the device. If the prediction is a range, use its middle."""
    reserved = found.peak + sum(found.reserve) / 2
    return {"allocated": found.peak, "reserved": reserved, "device": reserved + sum(found.base) / 2}[quantity]
