"""Tests of runs with adapters. The record must have the number of trained parameters and the number of all parameters.
A model without the matrices that the adapters need must be refused with an error message of one line."""

import io
import sys
from pathlib import Path

import pandas as pd
import pytest
from started_runs import PATIENCE_S, QUICK, Command

from bench import cli

pytestmark = pytest.mark.processes

RANK, LAYERS, WIDTH, INNER, PARAMETERS = 4, 4, 128, 512, 973_568  # of gpt2_tiny
WORDS = (*QUICK, "engine=ddp", "adapter=qlora", f"adapter.rank={RANK}")


def test_record_table_and_prediction_have_trained_and_total_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Command(tmp_path, WORDS)
    observed = run.record().observations
    matrices = ((WIDTH, 3 * WIDTH), (WIDTH, WIDTH), (WIDTH, INNER), (INNER, WIDTH))
    trained = LAYERS * RANK * sum(map(sum, matrices))
    assert observed
    assert (observed.trainable_parameters, observed.parameters) == (trained, PARAMETERS + trained)
    assert f"{trained:,} of {PARAMETERS + trained:,} parameters are trained" in run.output
    assert observed.collectives and observed.collectives["all_reduce"].payload_bytes == 4 * trained
    assert cli.main(["table", str(tmp_path), "--format", "csv"]) == 0
    row = pd.read_csv(io.StringIO(capsys.readouterr().out)).iloc[0]
    assert (row.parameters, row.trainable_parameters) == (PARAMETERS + trained, trained)
    assert row.adapter == "qlora rank=4 alpha=32 quantization=nf4 double_quantization=true"


@pytest.mark.parametrize(
    ("word", "package"),
    [("adapter=lora", "peft"), ("adapter=qlora", "bitsandbytes"), ("optimizer.name=adamw_8bit", "bitsandbytes")],
)
def test_a_run_without_a_package_of_the_extra_is_refused_before_it_starts(
    word: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    words = [word, "model=gpt2_tiny", "engine=ddp", "machine=cpu", "devices_per_node=1", "--results", str(tmp_path)]
    for verb in (["run", "--dry-run"], ["run"], ["sweep"]):
        assert cli.main([*verb, *words]) == 2
        told = f"{word}: needs the package {package}, which is not installed; pip install 'zeroscale[adapters]'"
        assert told in capsys.readouterr().err
    assert not list(tmp_path.rglob("record.json"))


def test_unknown_adapter_target_is_refused_before_any_output(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in (["run"], ["run", "--json"], ["sweep", "--dry-run"]):
        assert cli.main([*verb, "model=gpt2_tiny", "machine=cpu", "adapter=lora", "adapter.targets=[query]"]) == 2
        shown = capsys.readouterr()
        told = (
            "adapter.targets=query: the blocks of the model have no matrix of this name; choose from down_proj, o_proj"
        )
        assert told in shown.err and not shown.out


def test_pattern_that_freezes_every_parameter_is_reported_without_a_hint_at_the_log(tmp_path: Path) -> None:
    process = Command(
        tmp_path, (*[word for word in WORDS if "adapter" not in word], "adapter.frozen=weight|bias")
    ).process
    output, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    rule = "adapter.frozen=weight|bias: finds every parameter, so nothing would be trained; names are, for example, "
    assert f"rank 0 in engine: {rule}" in output
    assert "next: read the log" not in output + errors and "Traceback" not in output + errors
