"""Tests of the layouts (numbers of pipeline, tensor-parallel and data-parallel ranks) among which the advice searches.
The engine must support each layout, and the layout is printed as overrides."""

import json

import pytest

from bench.cli import main
from bench.config import compose
from bench.core.spec import Parallel, RunSpec, config_id
from bench.predict.advice.candidates import ENOUGH, LayoutAxes, apply_layout, can_run, list_layouts


def build(*words: str) -> RunSpec:
    given = ["machine=a100_80", "devices_per_node=8", "batch.micro=1", *words]
    return compose.compose_request(compose.parse_single(given)).spec


def test_engine_without_layouts_has_only_the_default_layout() -> None:
    assert list_layouts(build("engine=zero3", "model=mt5_xl"), LayoutAxes(), "cuda") == [Parallel()]


def test_pipeline_layouts_are_powers_of_2_with_tensor_parallelism_inside_a_node() -> None:
    found = list_layouts(build("engine=pipeline", "model=mt5_xl", "nodes=2"), LayoutAxes(), "cuda")
    assert {layout.tensor for layout in found} == {1, 2, 4, 8}
    assert {layout.pipeline for layout in found} == {1, 2, 4, 8, 16}
    assert Parallel() not in found and {layout.stages_per_rank for layout in found} == {1}
    assert [layout.ranks for layout in found] == sorted(layout.ranks for layout in found)
    looped = list_layouts(build("engine=interleaved", "model=tiny"), LayoutAxes(), "cuda")
    assert {layout.stages_per_rank * layout.pipeline for layout in looped if layout.pipeline > 1} == {8}


def test_given_axes_replace_the_default_layouts() -> None:
    axes = LayoutAxes(tensor=(2,), pipeline=(2, 3), stages_per_rank=(1,))
    found = list_layouts(build("engine=pipeline", "model=mt5_xl"), axes, "cuda")
    assert found == [Parallel(tensor=2, pipeline=2)]


def test_applied_layout_has_one_micro_batch_per_pipeline_rank() -> None:
    spec = apply_layout(build("engine=interleaved", "model=mt5_xl"), Parallel(pipeline=4, stages_per_rank=2))
    assert (spec.accumulation, spec.data_parallel, spec.global_batch) == (4, 2, 8)
    assert can_run(spec, "cuda")
    assert not can_run(apply_layout(spec, Parallel(pipeline=4)), "cuda"), "it has several stages on a rank"


def test_layout_is_advised_for_a_model_that_does_not_fit_a_device(
    capsys: pytest.CaptureFixture[str], tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    words = ["model=gpt_22b", "machine=a100_80", "devices_per_node=8", "nodes=1"]
    assert main(["advise", *words, "engine=ddp,pipeline", "max_global_batch=64", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    winner = answer["winner"]
    assert [row["what"] for row in answer["left_out"]] == ["ddp"]
    # per parameter 4 bytes of weights and gradients, and 12 that copies divide: at least 10 × 22e9 / 80e9 devices
    assert winner.get("tensor", 1) * winner.get("pipeline", 1) in (4, 8)
    again = compose.compose_request(compose.parse_single([*words[:-1], *winner["overrides"]])).spec
    assert config_id(again) == winner["config_id"]


def test_searched_layouts_have_at_most_twice_the_ranks_of_the_smallest_that_fits(
    capsys: pytest.CaptureFixture[str], tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    words = ["model=mt5_base", "machine=a100_80", "devices_per_node=8", "nodes=1", "batch.micro=1", "engine=pipeline"]
    assert main(["advise", *words, "activation_checkpointing=false", "--json"]) == 0
    layouts = list_layouts(build("engine=pipeline", "model=mt5_base"), LayoutAxes(), "cuda")
    smallest = layouts[0].ranks
    near = [layout for layout in layouts if layout.ranks <= ENOUGH * smallest]
    assert json.loads(capsys.readouterr().out)["candidates"] == len(near)


@pytest.mark.parametrize("batch", [["batch.micro=1", "batch.accumulation=160"], ["batch.micro=1", "batch.global=160"]])
def test_named_layout_may_have_several_nodes_and_many_micro_batches(
    batch: list[str], capsys: pytest.CaptureFixture[str], tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(str(tmp_path))
    words = ["model=gpt_22b", "machine=mi250x", "devices_per_node=8", "nodes=8", "engine=pipeline"]
    assert main(["advise", *words, "parallel.tensor=8", "parallel.pipeline=8", *batch, "--json"]) == 0
    winner = json.loads(capsys.readouterr().out)["winner"]
    assert (winner["tensor"], winner["pipeline"], winner["nodes"], winner["global_batch"]) == (8, 8, 8, 160)


def test_remedy_for_a_pipeline_that_does_not_fit_sets_its_layout_back(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=gpt_22b", "machine=mi250x", "devices_per_node=8", "nodes=8", "sequence.tokens=2048"]
    words += ["batch.micro=1", "batch.accumulation=8", "activation_checkpointing=true"]
    assert main(["predict", *words, "engine=modular", "parallel.stages_per_rank=50"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "Changes that make it fit: engine=zero2 parallel.stages_per_rank=1 fits." in told
    assert main(["predict", *words, "engine=zero2", "parallel.stages_per_rank=1"]) == 0
    assert "mi250x has 68.7 GB: fits." in capsys.readouterr().out
