"""Tests of the model family hugging_face. A model of any transformers architecture must have the number of parameters
and the initial weights that transformers gives it."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from bench import models
from bench.core.errors import NoPrediction, UserError
from bench.core.spec import RunSpec
from bench.measure.observe import count_flops
from bench.models.hugging_face import build, check, from_hugging_face, token_kinds
from bench.predict.work import compute_flops_per_step, compute_training_flops

LLAMA = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
BART = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 2, "is_encoder_decoder": True,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "gpt_neox": {**LLAMA, "max_position_embeddings": 64},
    "opt": {
        "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "max_position_embeddings": 64, "pad_token_id": 1,
    },
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4},
    "llama": {**LLAMA, "num_key_value_heads": 2},
    "qwen2": {**LLAMA, "num_key_value_heads": 2},
    "gemma": {**LLAMA, "num_key_value_heads": 1, "head_dim": 16, "pad_token_id": 0},
    "mixtral": {**LLAMA, "num_key_value_heads": 2, "num_local_experts": 4},
    "bart": BART,
    "marian": BART,
    "umt5": {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4, "is_encoder_decoder": True},
}  # fmt: skip


def config(kind: str, **more: Any) -> dict[str, Any]:
    return {"model_type": kind, "vocab_size": 96, **CONFIGS[kind], **more}


def spec(plain: dict[str, Any], **fields: Any) -> RunSpec:
    shape = from_hugging_face(plain)
    model = {"name": "theirs", "family": "hugging_face", "shape": shape.model_dump(exclude_defaults=True)}
    whole = {
        "model": model | fields.pop("model", {}),
        "engine": {"name": "ddp", "backend": "ddp"},
        "data": {"name": "synthetic", "source": "synthetic"},
        "batch": {"micro": 2},
        "objective": "seq2seq" if shape.is_encoder_decoder else "causal_lm",
        "sequence": dict.fromkeys(token_kinds(shape), 16),
        "precision": "fp32",
    }
    return RunSpec.model_validate(whole | fields)


def built(asked: RunSpec) -> Any:
    builder = models.load_builder("hugging_face")
    model = builder.build(asked)
    builder.initialise(model, asked)
    return model


def build_with_transformers(plain: dict[str, Any]) -> Any:
    kind = AutoModelForSeq2SeqLM if plain.get("is_encoder_decoder") else AutoModelForCausalLM
    torch.manual_seed(1)
    values = {name: value for name, value in plain.items() if name != "model_type"}
    return kind.from_config(AutoConfig.for_model(plain["model_type"], **values))


@pytest.mark.parametrize("kind", CONFIGS)
def test_initial_weights_have_the_distribution_of_transformers(kind: str) -> None:
    model = built(spec(config(kind), model={"attention": "eager"}))
    ours, theirs = (dict(one.named_parameters()) for one in (model, build_with_transformers(config(kind))))
    assert {name: p.shape for name, p in ours.items()} == {name: p.shape for name, p in theirs.items()}
    for name, parameter in ours.items():
        own, other = parameter.detach(), theirs[name].detach()
        spread = float(other.std()) if other.numel() > 1 else 0.0
        if spread == 0:
            assert torch.equal(own, other), name
        else:  # within 5 standard errors of each estimate
            tolerance = 5 * (2 / other.numel()) ** 0.5
            assert float(own.std()) == pytest.approx(spread, rel=tolerance), name
            assert float(own.mean()) == pytest.approx(float(other.mean()), abs=tolerance * spread), name


def test_initial_weights_depend_on_the_seed() -> None:
    one, same, another = (
        built(spec(config("gpt2"), seed=seed)).transformer.wte.weight.detach() for seed in (3, 3, 4)
    )  # fmt: skip
    assert torch.equal(one, same) and not torch.equal(one, another)


def test_tied_weight_stays_tied_and_residual_projection_is_scaled() -> None:
    """transformers initialises GPT-2 with a standard deviation of 0.02. For matrices whose output is added to the
    residual stream, the standard deviation is 0.02 / √(2 × layers)."""
    model = built(spec(config("gpt2")))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert float(model.transformer.h[0].mlp.c_proj.weight.detach().std()) == pytest.approx(0.02 / 2, rel=0.05)
    assert float(model.transformer.h[0].mlp.c_fc.weight.detach().std()) == pytest.approx(0.02, rel=0.05)


def test_dropout_comes_from_the_spec_and_not_from_the_config_file() -> None:
    plain = config("gpt2", resid_pdrop=0.3, embd_pdrop=0.3)
    assert {m.p for m in built(spec(plain)).modules() if isinstance(m, torch.nn.Dropout)} == {0.0}
    half = built(spec(plain, model={"dropout": 0.5}))
    assert {m.p for m in half.modules() if isinstance(m, torch.nn.Dropout)} == {0.5}


def test_config_fields_without_effect_on_the_network_are_ignored() -> None:
    plain = config("llama")
    ignored = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "attention_dropout": 0.1, "_name": "x"}
    assert from_hugging_face(plain | ignored) == from_hugging_face(plain)


@pytest.mark.parametrize(
    ("plain", "rotation"),
    [
        # keys as in the published config.json of Qwen2.5-0.5B and of Pythia-1B; others that resemble known keys
        ({"model_type": "mistral", "use_sliding_window": False, "forced_bos_token_id": 0}, {"rope_theta": 10000.0}),
        ({"model_type": "qwen2", "rope_theta": 1e6, "use_mrope": False, "max_window_layers": 24}, {"rope_theta": 1e6}),
        (
            {"model_type": "gpt_neox", "rotary_emb_base": 20000, "rotary_pct": 0.25},
            {"rope_theta": 20000, "partial_rotary_factor": 0.25},
        ),
    ],
)
def test_keys_of_older_published_files_are_converted_or_ignored(
    plain: dict[str, Any], rotation: dict[str, float]
) -> None:
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    built = build.build(spec(sizes | {"intermediate_size": 64, "num_key_value_heads": 2} | plain))
    assert built.config.rope_parameters == {"rope_type": "default"} | rotation  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"vocab_size": 8}, "config.json: lacks model_type"),
        ([], "config.json: lacks model_type and vocab_size"),
    ],
)
def test_config_of_no_language_model_is_refused(plain: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        from_hugging_face(plain)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        (config("gpt2") | {"model_type": "gpt20"}, "gpt20"),
        (config("gpt2", n_haed=4), "model_type=gpt2 has no n_haed in its config; did you mean n_head"),
        (config("gpt2", n_heads=4), "model_type=gpt2 has no n_heads in its config; did you mean n_head"),
        (config("gpt2") | {"model_type": "vit"}, "vit"),
        (config("bloom"), "no model.attention=sdpa for model_type=bloom; set it to eager"),
    ],
)
def test_config_that_transformers_cannot_build_is_refused(plain: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build.build(spec(plain))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": {"loss_chunk_tokens": 8}}, "model.loss_chunk_tokens=8: .* leave it out"),
        ({"model": {"compile": "blocks"}}, "model.compile=blocks: .* leave it out"),
        ({"model": {"attention": "flex"}}, "model.attention=flex: .* leave it out"),
        ({"objective": "causal_lm_documents"}, "models of transformers may attend across documents; choose"),
        ({"sequence": {"tokens": 65}}, "sequence.tokens=65: the model has 64 positions; give fewer tokens"),
    ],
)
def test_options_of_our_own_families_are_refused_for_transformers_models(fields: dict[str, Any], message: str) -> None:
    asked = spec(config("gpt2"), **fields)
    with pytest.raises(UserError, match=message):
        check(from_hugging_face(config("gpt2")), asked)


def test_flops_of_transformers_models_are_not_predicted() -> None:
    with pytest.raises(NoPrediction):
        compute_flops_per_step(spec(config("gpt2")))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_counted_flops_equal_a_calculation_by_hand(attention: str) -> None:
    """The forward pass of GPT-2 needs per token: 24 d² FLOPs in each layer, 2 d × vocabulary in the head, and 4 d ×
    tokens in each layer's attention. Backward needs twice as many. The embedding has no FLOPs, because it is a lookup,
    and its gradient is not a matrix product."""
    asked = spec(config("gpt2"), model={"attention": attention})
    model, tokens = built(asked), torch.arange(32).view(2, 16)
    forward = 32 * (2 * (24 * 64**2 + 4 * 64 * 16) + 2 * 64 * 96)
    assert count_flops(lambda: model(input_ids=tokens, labels=tokens).loss.backward()) == 3 * forward


def test_counted_flops_equal_the_closed_form() -> None:
    """FLOPs that torch counts for T5 equal the closed form of our T5 family. The first layer needs the gradients of its
    weights, but not the gradient of its input."""
    shape = {
        "d_model": 32, "d_kv": 8, "d_ff": 64, "encoder_layers": 2, "decoder_layers": 2, "heads": 4, "vocab": 96,
        "gated": True, "activation": "gelu_new", "separate_head": True,
    }  # fmt: skip
    asked = spec(
        config("bart"), model={"name": "t", "family": "t5", "shape": shape}, sequence={"encoder": 16, "decoder": 8}
    )
    builder, network = models.load_builder("t5"), models.build_network(asked.model)
    model = builder.build(asked)
    builder.initialise(model, asked)
    sample = {"input_ids": torch.arange(2, 18).view(1, 16), "labels": torch.arange(2, 10).view(1, 8)}
    assert network is not None
    assert count_flops(lambda: model(**sample).loss.backward()) == compute_training_flops(network, asked.sequence)
