"""Tests of training objectives, such as causal language modelling: how a user selects an objective, and which
micro-batches it makes."""

import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from installed_packages import Install

from bench import data, objectives
from bench.config import compose
from bench.config.decode import Request
from bench.config.exclude_rules import collect_fields, collect_fields_of_tree, list_field_names
from bench.core import plugins
from bench.core.errors import UserError
from bench.core.spec import LENGTHS, OBJECTIVE, RunSpec
from bench.core.study import Study

SHAPE = {
    "d_model": 4, "d_kv": 2, "d_ff": 6, "encoder_layers": 1, "decoder_layers": 1, "heads": 2, "vocab": 384,
    "gated": True, "activation": "gelu_new", "separate_head": True,
}  # fmt: skip
CPU = ("devices_per_node=1", "machine=cpu")


def ask(*overrides: str) -> Request:
    composed = compose.compose_request(compose.parse_single([*CPU, *overrides]))
    compose.check(composed, "cpu")
    return composed


def spec(objective: str, lengths: dict[str, int], source: str = "synthetic", **options: Any) -> RunSpec:
    return RunSpec.model_validate(
        {
            "model": {"name": "tiny", "shape": SHAPE},
            "engine": {"name": "ddp", "backend": "ddp"},
            "data": {"name": source, "source": source, "options": options},
            "batch": {"micro": 2},
            "objective": objective,
            "sequence": lengths,
        }
    )


def test_defaults_of_a_spec_are_those_of_its_objective() -> None:
    assert {kind.name: kind.length for kind in objectives.load(OBJECTIVE).KINDS} == LENGTHS


@pytest.mark.parametrize("name", plugins.list_names(plugins.OBJECTIVE))
def test_no_token_kind_has_the_name_of_a_padding_column(name: str) -> None:
    """For each kind of tokens (such as encoder tokens), a record has a column for the tokens and a column for their
    padding. No two of all these columns may have the same name."""
    assert not any(kind.endswith("_padding") for kind in objectives.list_kinds(name))


def test_objective_sets_its_lengths_and_each_can_be_overridden() -> None:
    assert ask("objective=seq2seq", "sequence.decoder=64").spec.sequence == {"encoder": 512, "decoder": 64}
    causal = compose.compose_request(compose.parse_single([*CPU, "objective=causal_lm"])).spec
    assert (causal.objective, causal.sequence) == ("causal_lm", {"tokens": 1024})
    longer = compose.compose_request(compose.parse_single([*CPU, "objective=causal_lm", "sequence.tokens=2048"])).spec
    assert longer.sequence == {"tokens": 2048}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            ("objective=causal_lm",),
            "objective=causal_lm: a model of family t5 learns from encoder and decoder tokens, it gives tokens; "
            "choose from seq2seq, span_corruption",
        ),
        (
            ("objective=causal_lm", "sequence.encoder=512"),
            "sequence.encoder: objective=causal_lm has no such tokens; did you mean sequence.tokens?",
        ),
        (("sequence.tokens=8",), "sequence.tokens: objective=span_corruption has no such tokens"),
        (("objective=causal",), "objective=causal: no such file in conf/objective; did you mean causal_lm?"),
        (("objective.noise=3",), "objective.noise: no such key"),
        (("sequence.encoder=0",), "sequence.encoder=0: must be an integer > 0; "),
        (("sequence=3",), "sequence=3: must be a mapping"),
        (
            ("objective=seq2seq", "data=text"),
            "data=text: has no samples for objective=seq2seq; choose data=synthetic",
        ),
        (
            ("parallel.tensor=2", "devices_per_node=2"),
            "parallel.tensor=2: engine zero2 does not support tensor parallelism; ",
        ),
        (
            ("parallel.stages_per_rank=4",),
            "parallel.stages_per_rank=4: engine zero2 does not support several stages per rank; ",
        ),
        (
            ("engine=ddp", "parallel.pipeline=2", "devices_per_node=2"),
            "parallel.pipeline=2: engine ddp does not support pipeline parallelism; remove it, or choose",
        ),
    ],
)
def test_impossible_objectives_are_refused_in_one_line(overrides: tuple[str, ...], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        ask(*overrides)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_study_can_vary_the_objective_and_exclude_by_it() -> None:
    axes = {"objective": ["span_corruption", "seq2seq"], "sequence.decoder": [64, 128]}
    rules = ("objective == 'seq2seq' and sequence.decoder < 128", "sequence.tokens == 3", "data_parallel != world_size")
    study = Study(name="s", base={"machine": "cpu", "devices_per_node": 1}, axes=axes, exclude=rules)
    found = compose.compose_points(study, [])
    assert [(p.composed.spec.objective, p.composed.spec.sequence["decoder"]) for p in found.points] == [
        ("span_corruption", 64), ("span_corruption", 128), ("seq2seq", 128),
    ]  # fmt: skip
    assert found.excluded == dict(zip(rules, (1, 0, 0), strict=True))


def test_exclude_rules_can_use_the_lengths_of_an_infeasible_point() -> None:
    assert {
        "sequence.encoder",
        "sequence.tokens",
        "objective",
        "data_parallel",
        "parallel.tensor",
    } <= list_field_names().keys()
    known = collect_fields_of_tree(
        {"objective": {"name": "causal_lm"}, "nodes": 2, "devices_per_node": 4, "sequence": {}}
    )
    assert (known["objective"], known["sequence"], known["data_parallel"]) == ("causal_lm", {"tokens": 1024}, 8)
    halved = collect_fields_of_tree(
        {"objective": {"name": "x"}, "nodes": 1, "devices_per_node": 4, "parallel": {"tensor": 2}}
    )
    assert halved["data_parallel"] == 2
    assert collect_fields(ask("objective=seq2seq"))["objective"] == "seq2seq"


def test_random_causal_tokens_are_inputs_and_labels() -> None:
    torch = pytest.importorskip("torch")
    tensors, padding = next(data.load("synthetic").micro_batches(spec("causal_lm", {"tokens": 16}), 0))
    assert tensors.keys() == {"input_ids", "labels"}
    assert tensors["input_ids"].shape == (2, 16)
    assert torch.equal(tensors["input_ids"], tensors["labels"])
    assert padding == {"tokens": 0}


def test_packed_causal_samples_are_consecutive_pieces_of_the_corpus(tmp_path: Path) -> None:
    pytest.importorskip("datasets").config.HF_DATASETS_CACHE = tmp_path / "cache"
    (tmp_path / "text.txt").write_text("\n".join("abcdefghij" for _ in range(8)))
    made = spec("causal_lm", {"tokens": 11}, "text", files=[str(tmp_path / "text.txt")], sample_by="line")
    for tensors, padding in islice(data.load("text").micro_batches(made, 0), 8):
        rows = tensors["labels"].tolist()
        assert [bytes(token - 3 for token in row[:-1]) for row in rows] == [b"abcdefghij"] * 2
        assert [row[-1] for row in rows] == [1, 1], "EOS between documents"
        assert tensors["input_ids"].tolist() == rows
        assert padding == {"tokens": 0}


def test_packed_documents_have_own_positions_and_do_not_predict_each_other(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("datasets").config.HF_DATASETS_CACHE = tmp_path / "cache"
    (tmp_path / "text.txt").write_text("\n".join(["abcd", "ef", "ghijk"]))
    options = {"files": [str(tmp_path / "text.txt")], "sample_by": "line"}
    made = spec("causal_lm_documents", {"tokens": 14}, "text", **options)  # with an EOS after each document
    tensors, _ = next(data.load("text").micro_batches(made, 0))
    assert tensors["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4, 5]] * 2
    begins = tensors["position_ids"] == 0
    assert (tensors["labels"][begins] == -100).all()
    assert torch.equal(tensors["labels"][~begins], tensors["input_ids"][~begins])
    alone, _ = next(data.load("synthetic").micro_batches(spec("causal_lm_documents", {"tokens": 5}), 0))
    assert alone["position_ids"].tolist() == [[0, 1, 2, 3, 4]] * 2


@pytest.mark.parametrize(
    ("model", "learns"),
    [
        ("gpt2_tiny", "causal_lm"),
        ("llama_3_8b", "causal_lm"),
        ("tiny", "span_corruption"),
        ("mt5_xl", "span_corruption"),
    ],
)
def test_model_gets_the_default_objective_of_its_family(model: str, learns: str) -> None:
    assert ask(f"model={model}").spec.objective == learns


def test_each_model_of_a_sweep_gets_its_own_default_objective() -> None:
    study = Study(name="s", base={"machine": "cpu", "devices_per_node": 1}, axes={"model": ["tiny", "llama_tiny"]})
    found = [point.composed.spec for point in compose.compose_points(study, []).points]
    assert [(spec.objective, tuple(spec.sequence)) for spec in found] == [
        ("span_corruption", ("encoder", "decoder")), ("causal_lm", ("tokens",)),
    ]  # fmt: skip


def test_chosen_objective_is_kept() -> None:
    assert ask("model=gpt2_tiny", "objective=causal_lm_documents").spec.objective == "causal_lm_documents"
    with pytest.raises(UserError, match="objective=span_corruption: a model of family gpt learns from tokens"):
        ask("model=gpt2_tiny", "objective=span_corruption")


def test_padding_of_unpacked_causal_text_has_no_loss(tmp_path: Path) -> None:
    pytest.importorskip("datasets").config.HF_DATASETS_CACHE = tmp_path / "cache"
    (tmp_path / "text.txt").write_text("abc\nabcdef")
    options = {"files": [str(tmp_path / "text.txt")], "sample_by": "line", "packing": False}
    tensors, padding = next(data.load("text").micro_batches(spec("causal_lm", {"tokens": 6}, "text", **options), 0))
    words = [100, 101, 102, 103, 104]
    assert sorted(tensors["input_ids"].tolist()) == [[*words[:3], 1, 0, 0], [*words, 1]]
    assert sorted(tensors["labels"].tolist()) == [[*words[:3], 1, -100, -100], [*words, 1]]
    assert tensors.keys() == {"input_ids", "labels"}, "padding comes last: nothing real looks at it"
    assert padding == {"tokens": 2}


@pytest.mark.parametrize(
    ("kinds", "reduction", "message"),
    [
        (
            'hidden={"label": 0.5}',
            "mean",
            "its kind tokens hides 'label', which is not one of its arguments; did you mean",
        ),
        ('hidden={"labels": 1.0}', "mean", "its kind tokens hides a share of 1 of labels"),
        ('hidden={"labels": -0.1}', "mean", "its kind tokens hides a share of -0.1 of labels"),
        ("hidden={}", "median", "REDUCTION is 'median'"),
    ],
)
def test_wrong_values_of_an_objective_are_refused_before_a_run(
    install: Install, kinds: str, reduction: str, message: str
) -> None:
    text = f"""
from bench.core.network import IGNORED, PAD, TokenKind
KINDS = (TokenKind("tokens", 64, {{"input_ids": PAD, "labels": IGNORED}}, {kinds}),)
REDUCTION = "{reduction}"
"""
    install("zeroscale.objective", "theirs = their_objective", text)
    with pytest.raises(UserError, match=re.escape(message)):
        objectives.load("theirs")
    assert objectives.list_matching(("tokens",)), "other objectives are not affected"
