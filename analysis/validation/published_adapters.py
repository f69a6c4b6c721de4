"""Published memory and step times of LoRA and QLoRA compared with predictions.

`results/published/adapters.csv` has the sources. Two of them, torchtune and Unsloth, were set aside before any of these
predictions was computed. No constant was chosen on any of the sources.
"""

from analysis.claims.sources import read_published
from analysis.validation import PredictionComparison, PredictionPoint, build_comparison, judge
from analysis.validation.published_memory import FITS
from analysis.validation.published_steps import build_question
from bench.core.network import count_trained_parameters
from bench.core.spec import RunSpec
from bench.predict.memory import MemoryPrediction, predict_memory
from bench.predict.step_time import predict_step_time
from bench.predict.workload import get_network

DEVICE_BYTES = {"A100-SXM4-40GB": 42_500_000_000}
_MEMORY = ("allocated", "reserved", "device", "memory")

Row = dict[str, str]


def compare() -> list[PredictionComparison]:
    """Return comparisons of predicted memory and step times of adapters with published values. The memory of held-out
    sources, on which no constant was chosen, has a comparison of its own."""
    rows = read_published("adapters").rows
    found = []
    for name, aside in (("adapters_memory_aside", "true"), ("adapters_memory", "false")):
        chosen = [row for row in rows if row["aside"] == aside and row["quantity"] in _MEMORY]
        found.append(build_comparison(name, map(_build_memory_point, chosen)))
    limits = [row for row in rows if row["quantity"] == "fits"]
    times = [row for row in rows if row["quantity"] == "time"]
    found.append(build_comparison("adapters_fits", map(_build_limit_point, limits)))
    found.append(build_comparison("adapters_times_aside", map(_build_time_point, times)))
    return found


def count_trained(row: Row) -> int:
    """Return the predicted number of trained parameters of a row."""
    return count_trained_parameters(get_network(_build_spec(row)))


def _build_spec(row: Row) -> RunSpec:
    return build_question(row["overrides"])[0]


def _describe(row: Row) -> str:
    return f"{row['source']}: {row['what']}"


def _build_unknown_point(row: Row) -> PredictionPoint:
    truth = float(row["truth"]) if row["truth"] else None
    return PredictionPoint(_describe(row), None, truth, verdict="not testable", reason=row["not_testable"])


def _build_memory_point(row: Row) -> PredictionPoint:
    if row["not_testable"]:
        return _build_unknown_point(row)
    predicted = _find_quantity(row["quantity"], predict_memory(_build_spec(row)))
    return PredictionPoint(_describe(row), predicted, float(row["truth"]), reason=row["note"])


def _find_quantity(quantity: str, found: MemoryPrediction) -> float:
    """Return the predicted bytes of the quantity that a source reports: bytes of tensors ("allocated"), of torch's
    allocator ("reserved"), or of the device. If the prediction is a range, use its middle."""
    reserved = found.peak + sum(found.reserve) / 2
    return {"allocated": found.peak, "reserved": reserved, "device": reserved + sum(found.base) / 2}[quantity]


def _build_limit_point(row: Row) -> PredictionPoint:
    room, truth = DEVICE_BYTES[row["unit"]], row["truth"] == "true"
    fits = predict_memory(_build_spec(row), "cuda", room).fits(room)
    return PredictionPoint(_describe(row), FITS[fits], FITS[truth], verdict=judge(fits is truth), reason=row["note"])


def _build_time_point(row: Row) -> PredictionPoint:
    if row["not_testable"]:
        return _build_unknown_point(row)
    spec, machine = build_question(row["overrides"])
    predicted, truth = predict_step_time(spec, machine), float(row["truth"])
    inside = predicted.low_s <= truth <= predicted.high_s
    return PredictionPoint(_describe(row), predicted.step_s, truth, verdict=judge(inside), reason=row["note"])
