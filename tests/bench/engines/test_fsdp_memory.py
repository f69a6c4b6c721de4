"""Memory of FSDP2: a rehearsed rank beside the real one, and both beside what is predicted."""

from typing import Any

import pytest
from started_ranks import Seen, start_ranks
from test_engines_agree import spec

from bench.predict.memory import memory
from bench.spec import RunSpec

SHAPE = {"d_model": 64, "d_kv": 16, "d_ff": 128, "encoder_layers": 3, "decoder_layers": 3, "heads": 4, "vocab": 2000,
         "gated": True, "activation": "gelu_new", "separate_head": True}  # fmt: skip
FIELDS: dict[str, Any] = {"model": {"name": "test", "shape": SHAPE}, "batch": {"micro": 2, "accumulation": 1}}
TWICE: dict[str, Any] = {"batch": {"micro": 2, "accumulation": 2}}
TWO = {
    "fp32": spec("fsdp", **FIELDS),
    "bf16": spec("fsdp", "bf16", **FIELDS),
    "bf16 reduced in fp32": spec("fsdp", "bf16", {"reduce_dtype": "fp32"}, **FIELDS),
    "kept": spec("fsdp_no_reshard", "bf16", **FIELDS),
    "checkpointed": spec("fsdp", "bf16", **FIELDS, activation_checkpointing=True),
    "reduced every time": spec("fsdp", **FIELDS | TWICE),
    "reduced once": spec("fsdp", more={"reduce_every_micro_step": False}, **FIELDS | TWICE),
}
GRID: dict[str, Any] = {"nodes": 2, "devices_per_node": 2}
FOUR = {
    "hybrid": spec("fsdp_hybrid", "bf16", **FIELDS, **GRID),
    "hybrid, twice": spec("fsdp_hybrid", "bf16", **FIELDS | TWICE, **GRID),
    "among neighbours": spec("fsdp", more={"reshard_after_forward": 2}, **FIELDS, **GRID),
}
REHEARSED = {2: 1, 4: 2}
"""Which rank of how many is rehearsed."""
CASES = [(2, label) for label in TWO] + [(4, label) for label in FOUR]

pytestmark = [pytest.mark.processes, pytest.mark.untimed]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Seen]:
    """What each real rank took, by how many there were."""
    return {
        ranks: start_ranks("memory_ranks.py", jobs, ranks, tmp_path_factory.mktemp("real"))
        for ranks, jobs in ((2, TWO), (4, FOUR))
    }


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    """What the rehearsed rank took."""
    return {
        ranks: start_ranks("memory_ranks.py", jobs, ranks, tmp_path_factory.mktemp("rehearsed"), REHEARSED[ranks])[0]
        for ranks, jobs in ((2, TWO), (4, FOUR))
    }


@pytest.mark.parametrize(("ranks", "label"), CASES)
def test_a_rehearsed_rank_holds_between_steps_what_the_real_one_does(
    real: dict[int, Seen], rehearsed: dict[int, dict[str, Any]], ranks: int, label: str
) -> None:
    there, here = real[ranks][REHEARSED[ranks]][label], rehearsed[ranks][label]
    assert here["resident"] == pytest.approx(there["resident"], abs=64)
    assert here["init_peak"] == pytest.approx(there["init_peak"], abs=64)
    # gloo works on a copy of what it gathers or reduces, which nobody pretends
    assert 0.8 < here["peak"] / there["peak"] <= 1.0001


@pytest.mark.parametrize(("ranks", "label"), CASES)
def test_predictions_are_those_of_both(
    real: dict[int, Seen], rehearsed: dict[int, dict[str, Any]], ranks: int, label: str
) -> None:
    asked = RunSpec.model_validate((TWO | FOUR)[label])
    for found, pretended in ((real[ranks][0][label], False), (rehearsed[ranks][label], True)):
        said = memory(asked, "cpu", rehearsed=pretended)
        assert said.resident == pytest.approx(found["resident"], rel=0.002)
        assert said.init_peak == pytest.approx(found["init_peak"], rel=0.01)
        assert said.peak == pytest.approx(found["peak"], rel=0.06)


def test_at_rest_there_are_twelve_bytes_per_parameter(real: dict[int, Seen]) -> None:
    """fp32 weights and two moments, divided among two ranks, whatever the run's precision."""
    parameters = 2 * 2000 * 64 + 3 * (4 * 64 * 64 + 3 * 64 * 128 + 2 * 64) + 3 * (8 * 64 * 64 + 3 * 64 * 128 + 3 * 64)
    parameters += 2 * 32 * 4 + 2 * 64  # position biases, last norms
    for label in ("fp32", "bf16", "kept"):
        assert real[2][0][label]["resident"] == pytest.approx(12 * parameters / 2, rel=0.001)
