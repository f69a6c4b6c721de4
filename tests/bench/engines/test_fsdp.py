"""FSDP2 on four ranks: hybrid shards and neighbours train as ddp does, and a checkpoint is taken up to the bit."""

from pathlib import Path
from typing import Any

import pytest
from started_ranks import Seen, start_ranks
from test_engines_agree import same, spec

from bench.predict.engine import engine_step
from bench.spec import RunSpec

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
DROPOUT: dict[str, Any] = {"model": {**spec("fsdp")["model"], "dropout": 0.1}}
SAVED = {
    "plain": spec("fsdp", **GRID, **DROPOUT),
    "hybrid in bf16": spec("fsdp_hybrid", "bf16", **GRID, **DROPOUT),
}

pytestmark = [pytest.mark.processes, pytest.mark.untimed]


def predicted(spec: RunSpec) -> dict[str, tuple[int, int]]:
    """Calls and payload bytes of a step by kind."""
    found: dict[str, tuple[int, int]] = {}
    for transfer in engine_step(spec, "cpu").transfers:
        calls, payload = found.get(transfer.kind, (0, 0))
        once = transfer.calls, transfer.payload_bytes
        found[transfer.kind] = calls + transfer.passes * once[0], payload + transfer.passes * once[1]
    return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What each rank saw of every job."""
    return start_ranks("engine_ranks.py", JOBS, RANKS, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("label", ["hybrid", "hybrid, reduced once", "among neighbours"])
def test_however_ranks_are_divided_losses_and_norms_are_those_of_ddp(seen: Seen, label: str) -> None:
    same(seen, label, "ddp fp32", losses=1e-6, norms=1e-6)


def test_bf16_is_near_ddp(seen: Seen) -> None:
    same(seen, "bf16", "ddp bf16", losses=2e-2, norms=2e-2)


def test_every_rank_starts_from_the_weights_of_ddp(seen: Seen) -> None:
    for precision, labels in (("fp32", ["hybrid", "among neighbours"]), ("bf16", ["bf16"])):
        weights = {rank[label]["weights"] for rank in seen for label in (f"ddp {precision}", *labels)}
        assert len(weights) == 1


def test_the_record_says_how_ranks_were_divided(seen: Seen) -> None:
    given = seen[0]["hybrid"]["config"]["fsdp"]
    assert (given["shard_ranks"], given["copies"]) == (2, 2)


@pytest.mark.parametrize("label", [label for label in JOBS if not label.startswith("ddp")])
def test_collectives_are_those_that_are_predicted(seen: Seen, label: str) -> None:
    said = predicted(RunSpec.model_validate(JOBS[label]))
    for rank in seen:
        assert {kind: tuple(found) for kind, found in rank[label]["collectives"].items()} == said


def test_every_block_is_gathered_twice_in_a_micro_step_and_the_rest_once(seen: Seen) -> None:
    """By hand: two micro-steps, two blocks in each stack, fp32. Of 32 numbers a token, heads of 8 × 4, MLPs of 64."""
    attention, mlp, table = 4 * 32 * 32 + 32, 3 * 32 * 64 + 32, 128 * 32
    blocks = 2 * (attention + mlp) + 2 * (2 * attention + mlp) + 2 * 32 * 4  # the position bias of each stack
    outside = 2 * table + 2 * 32
    collectives = seen[0]["among neighbours"]["collectives"]
    assert collectives["all_gather"] == [2 * (2 * 4 + 1), 4 * 2 * (2 * blocks + outside)]
    assert collectives["reduce_scatter"] == [2 * (4 + 1), 4 * 2 * (blocks + outside)]
    assert collectives["all_reduce"] == [1, 4]  # the norm
    halves = seen[0]["hybrid"]["collectives"]["all_reduce"]
    assert halves == [1 + 5, 4 + 4 * (blocks + outside) // 2]


def test_a_fresh_process_goes_on_from_a_checkpoint_to_the_bit(tmp_path: Path) -> None:
    """Dropout is drawn anew in every step, so the random state counts."""
    first = start_ranks("checkpoint_ranks.py", SAVED, RANKS, tmp_path / "first")
    second = start_ranks("checkpoint_ranks.py", SAVED, RANKS, tmp_path / "second")
    for saved, loaded in zip(first, second, strict=True):
        for label in SAVED:
            assert (saved[label].pop("loaded"), loaded[label].pop("loaded")) == (False, True)
            assert saved[label] == loaded[label]
    assert first[0]["plain"]["losses"] != first[1]["plain"]["losses"]
