"""Test that the predicted memory of decoder-only models equals that of recorded runs over gloo, within a tolerance."""

from pathlib import Path

import pytest

from bench.core import store
from bench.core.record import RunRecord
from bench.predict.memory import predict_memory

RUNS = Path(__file__).parents[3] / "results/measured/two_cores.zip"
STUDIES = ("fsdp_beside_zero_cpu", "gpt2_3b_cpu", "fsdp_beside_zero_testbed", "gpt2_3b_testbed")
PEAK = {"ddp": 0.012, "zero1": 0.006, "zero2": 0.045, "zero3": 0.008, "fsdp": 0.036}
CHECKPOINTED = {"ddp": 0.012, "zero1": 0.02, "zero2": 0.035, "zero3": 0.06, "fsdp": 0.12}
"""Bounds on the relative error of predicted peaks, by engine, without and with checkpointing.

Two deviations are known: FSDP2 does not yet gather the next block while the head's backward runs, and with
recomputation ZeRO holds two or three gradients more than predicted.
"""


def recorded() -> list[RunRecord]:
    return list(map(store.read_record, store.find_records(RUNS / study for study in STUDIES)))


def name(record: RunRecord) -> str:
    spec = record.spec
    again = "-checkpointed" * spec.activation_checkpointing
    return f"{spec.engine.name}-{spec.precision}-{spec.batch.micro}x{spec.sequence['tokens']}-{spec.world_size}{again}"


@pytest.mark.parametrize("record", recorded(), ids=name)
def test_predicted_memory_of_decoders_equals_recorded_runs(record: RunRecord) -> None:
    assert record.observations
    seen, predicted = record.observations.memory, predict_memory(record.spec, "cpu")
    peak, resident = (max(m.peak_allocated_bytes or 0 for m in seen), max(m.resident_bytes or 0 for m in seen))
    bounds = CHECKPOINTED if record.spec.activation_checkpointing else PEAK
    assert predicted.peak == pytest.approx(peak, rel=bounds[record.spec.engine.name.split("_")[0]])
    assert predicted.resident == pytest.approx(resident, rel=0.008)
