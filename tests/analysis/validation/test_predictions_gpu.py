"""Tests of the comparison of GPU runs with predictions. Most records are synthetic, so that their errors are known."""

from typing import Any

import pytest
from records import failed, memory, run, spec, steps

from analysis.validation import PredictionComparison, PredictionPoint, summarise_comparison
from analysis.validation.step_times import compare_gpu_runs
from bench.core.record import RunRecord
from bench.core.spec import EngineSpec
from bench.predict import memory as foretold
from bench.predict.step_time import predict_step_time

H200 = {
    "name": "h200", "device": "cuda", "peak_tflops": {"fp32": 67}, "memory_bytes": 141_000_000_000,
    "memory_bytes_per_s": 4.8e12,
}  # fmt: skip
ENGINE = EngineSpec(name="ddp", backend="ddp", options={"bucket_cap_mb": 25})
DDP = spec("ddp", ranks=1).model_copy(update={"engine": ENGINE})


def on_gpu(**more: Any) -> RunRecord:
    return run(DDP, machine=H200, **more)


def points(*records: RunRecord) -> dict[str, tuple[PredictionPoint, ...]]:
    return {one.name: one.points for one in compare_gpu_runs(records, [])}


def test_memory_is_compared_with_the_peak_and_time_with_the_median_step() -> None:
    peak = foretold.predict_memory(DDP, "cuda").peak
    taken = predict_step_time(DDP, on_gpu().circumstance.machine, "cuda").step_s
    record = on_gpu(memory=memory(1, peak=round(peak / 0.96)), steps=steps((taken / 1.2,) * 30))
    found = points(record)
    (bytes_,), (seconds,) = found["gpu_memory"], found["gpu_times"]
    assert (bytes_.error, bytes_.verdict) == (pytest.approx(-4, abs=0.1), "ok")
    assert (seconds.error, seconds.verdict) == (pytest.approx(20), "exception")


def test_run_out_of_memory_is_an_exception_only_if_predicted_to_fit() -> None:
    small = failed("oom", DDP, machine=H200 | {"memory_bytes": 10**6})
    (right,), (wrong,) = (points(record)["gpu_memory"] for record in (small, failed("oom", DDP, machine=H200)))
    assert (right.verdict, wrong.verdict) == ("ok", "exception")
    assert wrong.reason == "predicted to fit"


def test_machine_without_bandwidth_is_not_testable_and_cpu_runs_are_excluded() -> None:
    unknown = on_gpu().model_copy(deep=True)
    bare = unknown.circumstance.machine.model_copy(update={"memory_bytes_per_s": None})
    unknown = unknown.model_copy(update={"circumstance": unknown.circumstance.model_copy(update={"machine": bare})})
    assert [point.verdict for point in points(unknown)["gpu_times"]] == ["not testable"]
    nothing: list[PredictionComparison] = compare_gpu_runs([run(DDP)], [])
    assert [summarise_comparison(one).verdict for one in nothing] == ["nothing to compare"] * 4


def test_rehearsed_blocks_and_segments_are_compared_with_those_of_the_run() -> None:
    seen = memory(1, peak=1000)[0].model_copy(update={"peak_reserved_bytes": 2000})
    record = on_gpu(memory=[seen])
    row = {"config_id": record.config_id, "peak_bytes": "990", "reserved_bytes": "1700"}
    found = {one.name: one.points for one in compare_gpu_runs([record], [row])}
    (blocks,), (segments,) = found["gpu_rehearsed"], found["gpu_reserved"]
    assert (blocks.error, blocks.verdict) == (pytest.approx(-1), "ok")
    assert (segments.error, segments.verdict) == (pytest.approx(-15), "exception")
