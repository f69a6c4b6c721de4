"""Tests of the costs that engines predict, such as memory. The predicted bytes must agree with the way in which the
engine partitions its states. Predictions must also work for engines from other packages. If such an engine predicts no
costs, this must be reported."""

import re
from pathlib import Path

import pytest
from installed_packages import Install

from bench import engines
from bench.cli import main
from bench.config import compose
from bench.core.errors import NoPrediction
from bench.core.spec import RunSpec
from bench.predict.memory import find_largest_micro_batch, predict_host_memory, predict_memory
from bench.predict.step_time import predict_step_time
from bench.predict.workload import predict_engine_memory, predict_engine_step
from bench.sweep.forecast import Forecast, predict_forecast

WITHOUT_COSTS = """
from pydantic import BaseModel
from bench.core.engine_facts import EngineFacts
class Options(BaseModel): pass
def check(options, spec, device=None): pass
def facts(spec): return EngineFacts(label="Toy")
"""
WITH_COSTS = """
from bench.core.engine_facts import EngineFacts
from bench.engines.ddp import Options, check, costs
def memory(spec, model, device, room, rehearsed): return costs.DdpMemory(spec, model, device)
def step(spec, model, device): return costs.predict_step(spec, model)
def facts(spec): return EngineFacts(label="Toy", memory=memory, step=step)
"""
WHY = "engine.backend=toy: no prediction of its memory; measure it"
ON_GPUS = ("model=mt5_base", "machine=a100_80", "devices_per_node=8")


@pytest.fixture
def toy(install: Install, tmp_path: Path) -> tuple[str, ...]:
    """Install a plug-in engine `toy` that predicts no costs. Return the command-line words with which a command finds
    the plug-in."""
    install("zeroscale.engine", "toy = their_engine", WITHOUT_COSTS)
    (tmp_path / "conf" / "engine").mkdir(parents=True)
    (tmp_path / "conf" / "engine" / "toy.yaml").write_text("name: toy\nbackend: toy\n")
    return "--config-dir", str(tmp_path / "conf"), *ON_GPUS


def asked(*words: str) -> RunSpec:
    return compose.compose_request(compose.parse_single([*ON_GPUS, "launcher=slurm", *words])).spec


def toy_spec() -> RunSpec:
    spec = asked("engine=ddp")
    return spec.model_copy(update={"engine": spec.engine.model_copy(update={"backend": "toy"})})


@pytest.mark.parametrize("name", ["ddp", "zero0", "zero1", "zero2", "zero3"])
def test_predicted_states_are_divided_by_the_engines_division(name: str) -> None:
    """mt5_base in bf16 has 2 bytes per parameter for weights, 4 for master weights and 8 for AdamW's moments. The run
    has 8 ranks. Each of these three states is divided by the number of ranks among which the engine partitions the
    state."""
    spec, parameters = asked(f"engine={name}"), 582_401_280
    divided, held = engines.facts(spec).division, predict_engine_memory(spec, "cuda").resident()
    assert divided
    assert held["weights"] == pytest.approx(2 * parameters / divided.weights, rel=1e-3)
    assert held["master weights"] == pytest.approx(4 * parameters / divided.optimizer, rel=1e-5)
    assert held["optimizer moments"] == pytest.approx(8 * parameters / divided.optimizer, rel=1e-5)
    assert predict_engine_step(spec, "cuda").updated == pytest.approx(parameters / divided.optimizer, rel=1e-5)


def test_engine_of_another_package_is_predicted_with_its_own_costs(install: Install) -> None:
    install("zeroscale.engine", "toy = their_engine", WITH_COSTS)
    machine = compose.compose_request(compose.parse_single([*ON_GPUS, "launcher=slurm"])).machine
    assert predict_memory(toy_spec()) == predict_memory(asked("engine=ddp"))
    assert predict_step_time(toy_spec(), machine) == predict_step_time(asked("engine=ddp"), machine)


def test_engine_without_costs_is_not_predicted_and_the_error_has_the_reason(toy: tuple[str, ...]) -> None:
    machine = compose.compose_request(compose.parse_single([*ON_GPUS, "launcher=slurm"])).machine
    for predicted in (
        lambda: predict_memory(toy_spec()),
        lambda: predict_host_memory(toy_spec()),
        lambda: find_largest_micro_batch(toy_spec(), 10**11),
    ):
        with pytest.raises(NoPrediction, match=re.escape(WHY)):
            predicted()
    with pytest.raises(NoPrediction, match=r"toy: no prediction of its costs of a step"):
        predict_step_time(toy_spec(), machine)
    assert predict_forecast(toy_spec(), machine, "cuda") == Forecast()


@pytest.mark.parametrize(
    "verb",
    [
        ("predict", "engine=toy"),
        ("predict", "engine=toy", "--json"),
        ("advise", "engine=toy"),
        ("sweep", "engine=zero2,toy", "launcher=slurm", "launcher.gpus=--gres=gpu:{devices}", "--dry-run"),
    ],
    ids=" ".join,
)
def test_commands_report_a_missing_prediction_without_a_traceback(
    verb: tuple[str, ...], toy: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    main([*verb, *toy])
    printed = capsys.readouterr()
    assert WHY in " ".join(f"{printed.out} {printed.err}".split())
    assert "Traceback" not in printed.err


def test_sweep_predicts_points_of_other_engines(toy: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["sweep", "engine=zero2,toy", "launcher=slurm", "launcher.gpus=--gres=gpu:{devices}", "--dry-run", *toy])
        == 0
    )
    printed = capsys.readouterr().out
    assert WHY in " ".join(printed.split())
    assert printed.count("s a step") == 1


def test_rehearsal_of_an_engine_without_costs_is_refused_in_one_line(
    toy: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rehearse", "engine=toy", "--dry-run", "--config-dir", toy[1], "model=tiny", "nodes=2"]) != 0
    assert len(capsys.readouterr().err.splitlines()) == 1
