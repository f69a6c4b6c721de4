"""Tests of pipelines without running one. The stages and slices of all ranks together make up the whole model. A spec
that a pipeline cannot run raises an error of one line."""

from typing import Any

import pytest
import torch
from parity.covering import choose_cases, list_cases, list_pairs
from pipeline_ranks import micro_batches
from pipeline_specs import SHAPES, parts_of, spec

from bench import engines, models
from bench.cli import main
from bench.core.errors import UserError
from bench.core.network import count_parameters, count_part_elements
from bench.engines.distributed.slices import TensorRanks, find_slice


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("stages", [1, 2, 3, 6])
def test_pipeline_parts_have_the_parameters_of_the_whole_model(model: str, stages: int) -> None:
    job = spec(model, "1f1b", stages)
    family, network = models.load_divided_builder(job.model.family), models.build_network(job.model)
    assert network
    parts = parts_of(job)
    built = [family.build_part(job, part, torch.device("meta")) for part in parts]
    names = [[name for name, _ in part.named_parameters()] for part in built]
    shapes = {name: parameter.shape for name, parameter in family.build(job).named_parameters()}
    assert {name for part in names for name in part} == set(shapes)
    assert all(parameter.shape == shapes[name] for part in built for name, parameter in part.named_parameters())
    several = {name: [at for at, part in enumerate(names) if name in part] for name in shapes}
    assert family.find_shared(job, parts) == {name: at for name, at in several.items() if len(at) > 1}
    for part, module in zip(parts, built, strict=True):
        assert count_part_elements(network, [part]) == sum(parameter.numel() for parameter in module.parameters())
    assert count_part_elements(network, parts) == count_parameters(network)


@pytest.mark.parametrize("model", [*SHAPES, "unscaled"])
def test_pipeline_part_with_all_units_has_the_loss_and_gradients_of_the_model(model: str) -> None:
    job = spec("tied" if model == "unscaled" else model, "1f1b", 1)
    if model == "unscaled":
        shape = {**job.model.shape, "scaled_head": False}
        job = job.model_copy(update={"model": job.model.model_copy(update={"shape": shape})})
    family = models.load_divided_builder(job.model.family)
    whole, part = family.build(job), family.build_part(job, parts_of(job)[0])
    for module in (whole, part):
        family.initialise(module, job)
    [batch, *_] = micro_batches(job, 0, 0)
    losses = whole(**batch).loss, part(**batch)
    assert losses[0].equal(losses[1])
    for loss in losses:
        loss.backward()
    gradients = dict(whole.named_parameters())
    assert all(parameter.grad.equal(gradients[name].grad) for name, parameter in part.named_parameters())


@pytest.mark.parametrize(("fields", "line"), [
    ({"pipeline": 1}, "parallel.pipeline=1: engine pipeline needs at least two stages"),
    ({"schedule": "gpipe", "stages": 2}, "engine.schedule=gpipe: this schedule supports one stage per rank"),
    ({"schedule": "interleaved"}, "engine.schedule=interleaved: this schedule needs several stages"),
    ({"schedule": "interleaved", "stages": 2, "batch": {"micro": 1, "accumulation": 3}},
     "engine.schedule=interleaved: this schedule processes 2 micro-batches at a time"),
    ({"precision": "fp16"}, "precision=fp16: engine pipeline has no loss scale"),
    ({"optimizer": {"implementation": "native"}}, "optimizer.implementation=native"),
    ({"optimizer": {"name": "adafactor"}}, "optimizer.name=adafactor: its sums by row and column need whole matrices"),
])  # fmt: skip
def test_unsupported_pipeline_specs_are_refused_in_one_line(fields: dict[str, Any], line: str) -> None:
    job = spec("t5", **({"schedule": "1f1b", "pipeline": 2} | fields))
    engine = engines.load("pipeline")
    with pytest.raises(UserError, match=line) as refused:
        engine.check(engine.Options.model_validate(job.engine.options), job, None)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(("fields", "line"), [
    ({"compile": "blocks"}, "model.compile=blocks: engine pipeline does not support it"),
    ({"attention": "flex"}, "model.attention=flex: flex attention is untested with tensor parallelism"),
    ({"loss_chunk_tokens": 8}, "model.loss_chunk_tokens=8: with tensor parallelism, the loss cannot be"),
])  # fmt: skip
def test_unsupported_model_options_with_tensor_parallelism_are_refused(fields: dict[str, Any], line: str) -> None:
    job = spec("t5", "1f1b", 2, tensor=2)
    job, engine = job.model_copy(update={"model": job.model.model_copy(update=fields)}), engines.load("pipeline")
    with pytest.raises(UserError, match=line):
        engine.check(engine.Options.model_validate(job.engine.options), job, None)


def test_more_stages_than_units_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"stages_per_rank=5: t5 can be divided into at most 8 stages: embedding, 6 blocks, head"
    ):
        parts_of(spec("t5", "breadth_first", 2, 5))


@pytest.mark.parametrize(("model", "ranks", "rule"), [
    ("t5", 3, r"the 96 tokens|the 4 heads of t5; choose one of 1, 2, 4"),
    ("llama", 4, r"the 2 heads of keys and values of llama; choose one of 1, 2"),
    ("t5", 8, r"the 4 heads of t5; choose one of 1, 2, 4"),
])  # fmt: skip
def test_tensor_parallel_size_that_gives_unequal_slices_is_refused(model: str, ranks: int, rule: str) -> None:
    with pytest.raises(UserError, match=rf"parallel.tensor={ranks}: does not divide ({rule})"):
        parts_of(spec(model, "1f1b", 1, tensor=ranks))


@pytest.mark.parametrize("model", SHAPES)
@pytest.mark.parametrize("by_tokens", [False, True])
def test_slices_of_all_ranks_make_up_the_whole_model(model: str, by_tokens: bool) -> None:
    """The model has three stages, and each stage is built for both of two tensor-parallel ranks. Parameters must have
    the same names as in the whole model. Joined, the slices of the two ranks must have the shapes of the whole model's
    parameters. The number of elements must equal the prediction."""
    job = spec(model, "1f1b", 3, tensor=2, by_tokens=by_tokens)
    family, network = models.load_divided_builder(job.model.family), models.build_network(job.model)
    assert network
    group: Any = None
    ranks = [TensorRanks(group, 2, rank, by_tokens) for rank in range(2)]
    whole = {name: parameter.shape for name, parameter in family.build(job).named_parameters()}
    for part in parts_of(job):
        built = [dict(family.build_part(job, part, torch.device("meta"), among).named_parameters()) for among in ranks]
        assert built[0].keys() == built[1].keys() <= whole.keys()
        for name, parameter in built[0].items():
            found = find_slice(parameter)
            assert tuple(found.size_of_whole(parameter) if found else parameter.shape) == whole[name]
            assert found is None or built[1][name].tensor_slice.rank == 1
        assert all(
            count_part_elements(network, [part], 2) == sum(parameter.numel() for parameter in rank.values())
            for rank in built
        )


def test_stages_are_cut_by_flops_or_by_number_of_blocks() -> None:
    sample = {"encoder": 48, "decoder": 4}  # a block of the encoder costs nearly four times one of the decoder
    by_flops = [part.end - part.begin for part in parts_of(spec("t5", "1f1b", 3, sequence=sample))]
    engine = {"name": "pipeline", "backend": "pipeline", "options": {"schedule": "1f1b", "cut": "blocks"}}
    by_blocks = [part.end - part.begin for part in parts_of(spec("t5", "1f1b", 3, engine=engine, sequence=sample))]
    assert by_blocks == [3, 2, 3] and by_flops == [2, 1, 5]


def test_covering_set_of_cases_has_every_possible_pair_of_values() -> None:
    chosen = choose_cases(seed=3, tried=40)
    assert {pair for case in chosen for pair in list_pairs(case)} == {
        p for case in list_cases() for p in list_pairs(case)
    }
    assert len(chosen) < len(list_cases()) / 5
    assert all(case.build_spec().world_size == case.ranks for case in chosen)


def test_refusal_names_a_padded_vocabulary_with_which_the_slices_are_equal(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", "model=gpt3_2_7b", "machine=a100_80", "devices_per_node=8", "engine=pipeline", "batch.micro=1"]
    assert main([*words, "parallel.tensor=2"]) == 2
    remedy = capsys.readouterr().err.rpartition("or pad the vocabulary: ")[2].split()
    assert remedy[0] == "model.shape.vocab=50432"
    assert main([*words, "parallel.tensor=2", *remedy]) == 0
