"""Tests of 8-bit AdamW and Adafactor with every engine that supports them. The reference is the original optimizer of
bitsandbytes or transformers, which trains the whole model. Losses must equal those of the reference, and memory must
equal the prediction."""

from typing import Any

import pytest
import torch
from bitsandbytes.optim import AdamW8bit
from engine_ranks import MEMORY, STEPS, micro_batches
from started_ranks import Seen, start_ranks
from test_engines_agree import CLIPPING, RANKS, SHAPE, spec
from transformers import Adafactor

from analysis.verify import find_tolerance
from bench import models
from bench.core.spec import RunSpec
from bench.engines.precision.update import on_device
from bench.predict.memory import predict_memory

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

# Half of each matrix has more than 4,096 elements: only such large tensors get 8-bit moments.
MODEL = {"name": "test", "shape": SHAPE | {"vocab": 1024, "d_model": 64, "d_ff": 256, "d_kv": 32}}
EIGHT, FACTORED = ({"name": name, "lr": 1e-2, "gradient_clipping": CLIPPING} for name in ("adamw_8bit", "adafactor"))
WHOLE, DIVIDED = ("ddp", "zero0"), ("zero1", "zero2", "zero3", "fsdp")
"""Engines that update whole parameters, and engines that update partitions of them."""


def job(engine: str, optimizer: dict[str, Any], precision: str = "fp32") -> dict[str, Any]:
    return spec(engine, precision, model=MODEL, optimizer=optimizer)


JOBS = {
    **{f"{name} 8 bits": job(name, EIGHT) for name in (*WHOLE, *DIVIDED)},
    **{f"{name} factored": job(name, FACTORED) for name in WHOLE},
    **{f"{MEMORY}{name} 8 bits": job(name, EIGHT, "bf16") for name in ("ddp", "zero0", "zero1", "zero3", "fsdp")},
    **{f"{MEMORY}{name} factored": job(name, FACTORED, "bf16") for name in WHOLE},
}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """Observations of the ranks' trainings, such as losses and memory: one dict per rank, whose keys are labels of
    jobs. FSDP2 runs in processes without DeepSpeed, because the two libraries in one process once caused a crash."""
    fsdp = {label: plain for label, plain in JOBS.items() if "fsdp" in label}
    rest = {label: plain for label, plain in JOBS.items() if label not in fsdp}
    parts = [start_ranks("engine_ranks.py", jobs, RANKS, tmp_path_factory.mktemp("ranks")) for jobs in (rest, fsdp)]
    return [one | other for one, other in zip(*parts, strict=True)]


def train_alone(plain: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Train the whole model of the job `plain` in this process, with AdamW of bitsandbytes or Adafactor of
    transformers. Return one list for each rank of the distributed run of this job. The list has the loss of that rank's
    samples at each step."""
    asked = RunSpec.model_validate(plain)
    family = models.load_builder(asked.model.family)
    module = family.build(asked, on_device("fp32"))
    family.initialise(module, asked)
    if asked.optimizer.name == "adamw_8bit":
        optimizer: torch.optim.Optimizer = AdamW8bit(module.parameters(), lr=1e-2, weight_decay=0.01)
    else:
        optimizer = Adafactor(
            module.parameters(), lr=1e-2, weight_decay=0.01, relative_step=False, scale_parameter=False
        )
    losses: list[list[float]] = [[] for _ in range(RANKS)]
    for step in range(STEPS):
        for rank in range(RANKS):
            monkeypatch.setenv("RANK", str(rank))
            found = [module(**batch).loss for batch in micro_batches(asked, step)]
            loss = torch.stack(found).mean()
            (loss / RANKS).backward()
            losses[rank].append(float(loss.detach()))
        torch.nn.utils.clip_grad_norm_(module.parameters(), CLIPPING)
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("kind", ["8 bits", "factored"])
def test_engines_with_whole_parameters_train_like_the_optimizer_library(
    seen: Seen, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = train_alone(JOBS[f"ddp {kind}"], monkeypatch)
    for rank, losses in zip(seen, expected, strict=True):
        for engine in WHOLE:
            assert rank[f"{engine} {kind}"]["losses"] == pytest.approx(losses, rel=1e-5)
    assert seen[0]["ddp 8 bits"]["losses"] != seen[0]["ddp factored"]["losses"]


@pytest.mark.parametrize("engine", DIVIDED)
def test_8_bit_adamw_on_partitions_is_close_to_that_on_whole_parameters(seen: Seen, engine: str) -> None:
    """8-bit moments are quantised in blocks of 256 elements. The blocks of a partition have other boundaries than those
    of a whole parameter, so quantised values differ slightly."""
    allowed = find_tolerance(RunSpec.model_validate(JOBS[f"{engine} 8 bits"]))
    for rank in seen:
        losses, reference = (rank[f"{name} 8 bits"]["losses"] for name in (engine, "ddp"))
        assert losses == pytest.approx(reference, rel=allowed)
        # the first update comes before any quantisation
        assert losses[:2] == pytest.approx(reference[:2], rel=1e-5)


@pytest.mark.parametrize("label", [label for label in JOBS if label.startswith(MEMORY)])
def test_memory_with_each_optimizer_equals_the_prediction(seen: Seen, label: str) -> None:
    predicted = predict_memory(RunSpec.model_validate(JOBS[label]), "cpu")
    assert seen[0][label]["resident"] == pytest.approx(predicted.resident, abs=1000)
    # gloo's threads free a reduced bucket at a different time on every rank
    peak = min(rank[label]["peak"] for rank in seen)
    assert peak == pytest.approx(predicted.peak, rel=0.05)  # FSDP2 in backward: 0.035


def test_engine_config_has_the_optimizer_class_and_its_settings(seen: Seen) -> None:
    eight, factored = (seen[0][f"ddp {kind}"]["config"]["optimizer"] for kind in ("8 bits", "factored"))
    assert eight["type"] == "bitsandbytes.optim.AdamW8bit"
    assert factored["type"] == "transformers.Adafactor"
    assert (factored["decay_rate"], factored["relative_step"]) == (-0.8, False) and "betas" not in factored
    assert seen[0]["zero2 8 bits"]["config"]["chosen"]["optimizer"] == "bitsandbytes.optim.adamw.AdamW8bit"
