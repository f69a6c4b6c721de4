"""A user's config.json, trained by the family without formulas: equal losses, FLOPs counted, nothing predicted."""

import io
import json
from pathlib import Path

import pandas as pd
import pytest
from started_runs import QUICK, Command

from analysis.flags import list_flags
from bench import cli

GPT2 = {"model_type": "gpt2", "vocab_size": 384, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
OWN = [text for text in QUICK if not text.startswith(("model=", "sequence."))]
FLOPS = 3 * 4 * 32 * (2 * (24 * 64**2 + 4 * 64 * 32) + 2 * 64 * 384)
"""Of a step with 4 samples of 32 tokens: 24 d² a layer and 2 d × vocabulary for a token, 4 d × tokens for attention."""

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    file = tmp_path_factory.mktemp("model") / "config.json"
    file.write_text(json.dumps(GPT2))
    model = ["model=hugging_face", f"model.config_file={file}", "model.name=own", "model.family=hugging_face"]
    return [*model, *OWN, "objective=causal_lm", "sequence.tokens=32", "machine=cpu"]


def test_engines_agree_and_flops_are_counted(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    losses = {}
    for engine in ("ddp", "zero3"):
        run = Command(tmp_path / engine, [*asked, f"engine={engine}"])
        record = run.record()
        assert record.outcome.kind == "ok", (run.output, run.errors)
        assert record.observations and record.observations.steps
        losses[engine] = record.observations.steps.loss[:5]
        assert record.observations.counted_flops == FLOPS
        assert "counted_flops" in list_flags(record) and "counted_flops" in run.output
        assert (
            cli.main(["table", str(tmp_path / engine), "--columns", "model,model_tflops_per_device", "--format", "csv"])
            == 0
        )
        row = pd.read_csv(io.StringIO(capsys.readouterr().out)).iloc[0]
        assert row.model == "own" and row.model_tflops_per_device > 0
    assert losses["zero3"] == pytest.approx(losses["ddp"], rel=1e-5)


def test_recomputation_is_no_part_of_the_models_flops(asked: list[str], tmp_path: Path) -> None:
    from analysis.observed import compute_step_flops

    record = Command(tmp_path, [*asked, "engine=ddp", "devices_per_node=1", "activation_checkpointing=true"]).record()
    hardware = compute_step_flops(record, "hardware")
    assert compute_step_flops(record, "model") is None, "the counter cannot tell it apart"
    assert hardware and FLOPS / 2 < hardware < FLOPS / 2 * 4 / 3


@pytest.mark.parametrize(("verb", "code"), [("predict", 0), ("advise", 2)])
def test_it_is_said_that_nothing_is_predicted(
    verb: str, code: int, asked: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    machine = [*(text for text in asked if not text.startswith("machine=")), "machine=a100_80"]
    assert cli.main([verb, *machine, *(["engine=zero2"] if verb == "predict" else [])]) == code
    said = capsys.readouterr()
    assert "no prediction: the family does not describe this model's network; measure it" in said.out + said.err


def test_a_rank_of_a_larger_job_is_rehearsed(
    asked: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rehearsal runs the model itself: it needs no formula."""
    larger = [text for text in asked if not text.startswith("devices_per_node=")]
    assert cli.main(["rehearse", *larger, "engine=zero2", "devices_per_node=4", "--results", str(tmp_path)]) == 0
    assert "the others pretended" in capsys.readouterr().out
