"""Tests of FSDP2 on four ranks. With hybrid sharding, or with resharding among two neighbouring ranks, it trains like
DDP. Its collectives and its memory equal the predictions. A rehearsed rank, which runs without the other ranks, has the
same memory."""

from collections.abc import Iterator
from typing import Any

import pytest
from started_ranks import Seen, start_ranks
from test_engines_agree import same, spec

from bench.core.spec import RunSpec
from bench.predict.memory import predict_memory
from bench.predict.workload import predict_engine_step

RANKS = 4
GRID: dict[str, Any] = {"nodes": 2, "devices_per_node": 2}
JOBS = {
    "ddp fp32": spec("ddp", **GRID),
    "ddp bf16": spec("ddp", "bf16", **GRID),
    "hybrid": spec("fsdp_hybrid", **GRID),
    "hybrid, reduced once": spec("fsdp_hybrid", more={"reduce_every_micro_step": False}, **GRID),
    "among neighbours": spec("fsdp", more={"reshard_after_forward": 2}, **GRID),
    "bf16": spec("fsdp", "bf16", **GRID),
}
SHAPE = {"d_model": 64, "d_kv": 16, "d_ff": 128, "encoder_layers": 3, "decoder_layers": 3, "heads": 4, "vocab": 2000,
         "gated": True, "activation": "gelu_new", "separate_head": True}  # fmt: skip
ONCE: dict[str, Any] = {**GRID, "model": {"name": "test", "shape": SHAPE}, "batch": {"micro": 2, "accumulation": 1}}
TWICE: dict[str, Any] = {**ONCE, "batch": {"micro": 2, "accumulation": 2}}
HELD = {
    "memory: fp32": spec("fsdp", **ONCE),
    "memory: bf16 reduced in fp32": spec("fsdp", "bf16", {"reduce_dtype": "fp32"}, **ONCE),
    "memory: kept": spec("fsdp_no_reshard", "bf16", **ONCE),
    "memory: checkpointed": spec("fsdp", "bf16", **ONCE, activation_checkpointing=True),
    "memory: reduced once": spec("fsdp", more={"reduce_every_micro_step": False}, **TWICE),
    "memory: hybrid": spec("fsdp_hybrid", "bf16", **TWICE),
    "memory: among neighbours": spec("fsdp", more={"reshard_after_forward": 2}, **ONCE),
}
REHEARSED = 2
"""Index of the rehearsed rank."""

pytestmark = [pytest.mark.thorough, pytest.mark.processes]


def predicted(spec: RunSpec) -> dict[str, tuple[int, int]]:
    """Return the prediction for the collectives of a step: the number of calls and their payload in bytes, by kind of
    collective."""
    found: dict[str, tuple[int, int]] = {}
    for transfer in predict_engine_step(spec, "cpu").transfers:
        calls, payload = found.get(transfer.kind, (0, 0))
        once = transfer.calls, transfer.payload_bytes
        found[transfer.kind] = calls + transfer.passes * once[0], payload + transfer.passes * once[1]
    return found


@pytest.fixture(scope="module", autouse=True)
def _without_packed_weights() -> Iterator[None]:
    """Keep oneDNN from packing bf16 weights, which it does on CPUs with AMX. The packed copies use torch's allocator,
    so they would count as memory, and predictions do not include them. An environment variable limits oneDNN to AVX2.
    It is set before the ranks start, because oneDNN reads it at a rank's first operation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        yield


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Observations of four real ranks, one dict per rank. The keys of a dict are labels of jobs."""
    return start_ranks("engine_ranks.py", JOBS | HELD, RANKS, tmp_path_factory.mktemp("four"))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Memory in bytes of one rehearsed rank, by job. The other ranks are simulated."""
    return start_ranks("engine_ranks.py", HELD, RANKS, tmp_path_factory.mktemp("alone"), REHEARSED)[0]


@pytest.mark.parametrize("label", ["hybrid", "hybrid, reduced once", "among neighbours"])
def test_losses_and_norms_of_fsdp_equal_those_of_ddp_for_every_sharding(seen: Seen, label: str) -> None:
    same(seen, label, "ddp fp32", losses=1e-6, norms=1e-6)


def test_fsdp_in_bf16_is_close_to_ddp(seen: Seen) -> None:
    same(seen, "bf16", "ddp bf16", losses=2e-2, norms=2e-2)


def test_initial_weights_of_every_fsdp_rank_equal_those_of_ddp(seen: Seen) -> None:
    for precision, labels in (("fp32", ["hybrid", "among neighbours"]), ("bf16", ["bf16"])):
        weights = {rank[label]["weights"] for rank in seen for label in (f"ddp {precision}", *labels)}
        assert len(weights) == 1


def test_engine_config_has_the_numbers_of_shard_ranks_and_copies(seen: Seen) -> None:
    given = seen[0]["hybrid"]["config"]["fsdp"]
    assert (given["shard_ranks"], given["copies"]) == (2, 2)


@pytest.mark.parametrize("label", [label for label in JOBS if not label.startswith("ddp")])
def test_collectives_of_fsdp_equal_the_prediction(seen: Seen, label: str) -> None:
    expected = predicted(RunSpec.model_validate(JOBS[label]))
    for rank in seen:
        assert {kind: tuple(found) for kind, found in rank[label]["collectives"].items()} == expected


def test_fsdp_gathers_each_block_twice_per_micro_step_and_other_weights_once(seen: Seen) -> None:
    """The expected bytes are calculated by hand for two micro-steps in fp32. The model has two blocks in each stack,
    states of width 32, 4 attention heads of width 8, and an MLP of inner width 64."""
    attention, mlp, table = 4 * 32 * 32 + 32, 3 * 32 * 64 + 32, 128 * 32
    blocks = 2 * (attention + mlp) + 2 * (2 * attention + mlp) + 2 * 32 * 4  # the position bias of each stack
    outside = 2 * table + 2 * 32
    collectives = seen[0]["among neighbours"]["collectives"]
    assert collectives["all_gather"] == [2 * (2 * 4 + 1), 4 * 2 * (2 * blocks + outside)]
    assert collectives["reduce_scatter"] == [2 * (4 + 1), 4 * 2 * (blocks + outside)]
    assert collectives["all_reduce"] == [1, 4]  # the norm
    halves = seen[0]["hybrid"]["collectives"]["all_reduce"]
    assert halves == [1 + 5, 4 + 4 * (blocks + outside) // 2]


@pytest.mark.parametrize("label", HELD)
def test_memory_of_a_rehearsed_fsdp_rank_equals_that_of_the_real_rank(
    seen: Seen, alone: dict[str, Any], label: str
) -> None:
    there, here = seen[REHEARSED][label], alone[label]
    assert here["resident"] == pytest.approx(there["resident"], abs=64)
    assert here["init_peak"] == pytest.approx(there["init_peak"], rel=0.01)
    # gloo works on a copy of the tensors that it gathers or reduces; a rehearsal has no such copy
    assert 0.75 < here["peak"] / there["peak"] < 1.001


@pytest.mark.parametrize("label", HELD)
def test_predicted_memory_equals_that_of_real_and_rehearsed_fsdp_ranks(
    seen: Seen, alone: dict[str, Any], label: str
) -> None:
    for found, pretended, near in ((seen[0][label], False, 0.1), (alone[label], True, 0.05)):
        expected = predict_memory(RunSpec.model_validate(HELD[label]), "cpu", rehearsed=pretended)
        assert expected.resident == pytest.approx(found["resident"], rel=0.002)
        assert expected.init_peak == pytest.approx(found["init_peak"], rel=0.11)
        assert expected.peak == pytest.approx(found["peak"], rel=near)


def test_fsdp_memory_between_steps_is_12_bytes_per_parameter(seen: Seen) -> None:
    """The 12 bytes are weights and two moments in fp32, for any precision of the run. They are partitioned among all
    ranks. With hybrid sharding, they are partitioned only among the ranks of a node."""
    layer, mlp = 4 * 64 * 64 + 64, 3 * 64 * 128 + 64
    parameters = 2 * 2000 * 64 + 3 * (layer + mlp) + 3 * (2 * layer + mlp) + 2 * 32 * 4 + 2 * 64
    for label, ranks in (("fp32", 4), ("kept", 4), ("hybrid", 2)):
        assert seen[0][f"memory: {label}"]["resident"] == pytest.approx(12 * parameters / ranks, rel=0.001)
