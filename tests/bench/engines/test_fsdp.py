"""FSDP2 on four ranks: hybrid shards and neighbours train as ddp does, and a checkpoint is taken up to the bit."""

from pathlib import Path
from typing import Any

import pytest
from started_ranks import Seen, start_ranks
from test_engines_agree import same, spec

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


def test_a_fresh_process_goes_on_from_a_checkpoint_to_the_bit(tmp_path: Path) -> None:
    """Dropout is drawn anew in every step, so the random state counts."""
    first = start_ranks("checkpoint_ranks.py", SAVED, RANKS, tmp_path / "first")
    second = start_ranks("checkpoint_ranks.py", SAVED, RANKS, tmp_path / "second")
    for saved, loaded in zip(first, second, strict=True):
        for label in SAVED:
            assert (saved[label].pop("loaded"), loaded[label].pop("loaded")) == (False, True)
            assert saved[label] == loaded[label]
    assert first[0]["plain"]["losses"] != first[1]["plain"]["losses"]
