"""Tests that compare our code for pipeline and tensor parallelism with torch's code, on two real ranks. Our executor
must give the same results as torch's pipeline schedules. Our sliced layers must give the same results as DTensor.
Rounding errors are allowed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from oracle_ranks import RANKS, REDUCTIONS, SCHEDULES, VOCABULARY, Both

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

REGIONS = ("region", "embedding")
NEAR = 2e-6


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Both]]:
    """Results of each rank, by name of the comparison. A result maps the name of a tensor to our value and torch's
    value."""
    folder, script = tmp_path_factory.mktemp("ranks"), Path(__file__).with_name("oracle_ranks.py")
    done = subprocess.run(
        [sys.executable, str(script), str(folder / "seen")],
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"seen-{rank}.pt") for rank in range(RANKS)]


def assert_equal(both: Both) -> None:
    for name, (ours, theirs) in both.items():
        near = NEAR * float(theirs.abs().max())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=near, msg=lambda found, name=name: f"{name}: {found}")


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_losses_and_gradients_equal_those_of_torchs_schedule(seen: list[dict[str, Both]], schedule: str) -> None:
    for rank in seen:
        assert_equal(rank[schedule])
    first, last = (rank[schedule] for rank in seen)
    assert sum(name.startswith("loss") for name in last) == 4 and not any(name.startswith("loss") for name in first)
    assert {name.split(".")[0] for name in first if "." in name} == ({"0"} if len(first) == 2 else {"0", "2"})


@pytest.mark.parametrize("by_tokens", ["", ", by tokens"])
@pytest.mark.parametrize("what", REGIONS)
def test_sliced_layers_have_the_results_and_gradients_of_dtensor(
    seen: list[dict[str, Both]], what: str, by_tokens: str
) -> None:
    for rank in seen:
        assert_equal(rank[what + by_tokens])
        share = 3 if by_tokens else 6
        assert rank[what + by_tokens]["states"][0].shape[1] == share


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_sliced_loss_and_its_gradient_equal_those_of_dtensor(seen: list[dict[str, Both]], reduction: str) -> None:
    for rank in seen:
        assert_equal(rank[f"loss, {reduction}"])
        assert rank[f"loss, {reduction}"]["gradient"][0].shape[1] == VOCABULARY // RANKS
