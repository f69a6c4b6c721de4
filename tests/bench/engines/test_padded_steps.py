"""Tests of steps with padded samples, on real ranks over gloo. Every micro-batch has a different number of target
tokens. A step must equal that of one process whose loss is the mean over all target tokens."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pipeline_runs import Ranks, compare_to_one_process, run_jobs
from pipeline_specs import pad
from pipeline_specs import spec as build_spec

from bench.core.spec import RunSpec
from bench.predict.workload import predict_engine_step, predict_pipeline

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


def padded(*fields: Any, loss_mean: str = "tokens", **more: Any) -> RunSpec:
    """Return a spec with padded data. `fields` and `more` are the arguments of the function `spec` in
    pipeline_specs.py."""
    return pad(build_spec(*fields, **more), loss_mean)


FEW = {
    "ddp": padded("t5", "", 1, data=2, preset="ddp"),
    "zero2": padded("gpt", "", 1, data=2, preset="zero2"),
    "pipeline": padded("t5", "1f1b", 2),
    "pipeline, mean of micro-batches": padded("t5", "1f1b", 2, loss_mean="micro_batches"),
}
ALL = {
    **{name: padded("t5", "", 1, data=4, preset=name) for name in ("ddp", "zero0", "zero1", "zero3", "fsdp")},
    "layered": padded("t5", "breadth_first", 1, 8, data=2),
    "layered, divided": padded("gpt", "breadth_first", 1, 6, data=2, sharding="zero3"),
    "interleaved, two copies": padded("gpt", "interleaved", 2, 2, data=2),
    "breadth-first, documents": padded("documents", "breadth_first", 2, 2, data=2),
    "sliced": padded("t5", "1f1b", 1, tensor=2),
    "sliced by tokens in a pipeline of copies": padded("gpt", "1f1b", 2, data=2, tensor=2, by_tokens=True),
}


def check(jobs: dict[str, RunSpec], seen: dict[str, Ranks]) -> None:
    """Check that each job has the losses, gradient norms and weights of the same training in one process. With DDP,
    also check that the collectives equal the predicted ones. `seen` has the observations of the ranks by label."""
    for label, job in jobs.items():
        near = 1e-6 if job.parallel.tensor == 1 else 1e-5
        losses, norms, weights, _, unequal = compare_to_one_process(job, seen[label])
        assert (losses < near, norms < 1e-5, weights < 1e-5, unequal) == (True, True, True, []), (label, losses, norms)
        if job.engine.backend == "ddp":
            calls, payload = Counter[str](), Counter[str]()
            for transfer in predict_engine_step(job, "cpu").transfers:
                calls[transfer.kind] += transfer.calls * transfer.passes
                payload[transfer.kind] += transfer.payload_bytes * transfer.passes
            for rank in seen[label]:
                assert rank["traffic"] == {kind: (calls[kind], payload[kind]) for kind in calls}, label


def test_padded_steps_of_a_few_engines_equal_one_process(tmp_path: Path) -> None:
    seen = run_jobs(FEW, tmp_path)
    check(FEW, seen)
    tokens, means = (seen[label] for label in ("pipeline", "pipeline, mean of micro-batches"))
    assert tokens[0]["norms"] != pytest.approx(means[0]["norms"], rel=1e-4), "a mean of means gives a different step"
    for one, other in zip(tokens, means, strict=True):
        calls, payload = other["traffic"]["all_reduce"]
        assert one["traffic"] == other["traffic"] | {"all_reduce": (calls + 1, payload + 8)}
    with_count, without = (
        predict_pipeline(FEW[label], "cpu") for label in ("pipeline", "pipeline, mean of micro-batches")
    )
    assert with_count and without
    for place, plain in zip(with_count.places, without.places, strict=True):
        [added] = [transfer for transfer in place.step.transfers if transfer not in plain.step.transfers]
        assert (added.kind, added.calls, added.payload_bytes, added.ranks) == ("all_reduce", 1, 8, 2)


@pytest.mark.thorough
def test_padded_steps_of_all_engines_and_schedules_equal_one_process(tmp_path: Path) -> None:
    check(ALL, run_jobs(ALL, tmp_path))
