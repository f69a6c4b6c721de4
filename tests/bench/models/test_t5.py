"""Tests of T5. Its closed forms for parameters and FLOPs must equal torch's counts. Its initial weights must depend
only on the seed and the parameter's name, and have the distributions of transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    MT5Config,
    MT5ForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

from bench.config import compose
from bench.core.errors import UserError
from bench.core.network import count_parameters, units
from bench.core.spec import RunSpec
from bench.engines.precision.update import whole
from bench.models import t5
from bench.models.checkpoint.tensors import load_weights
from bench.models.t5.build import build, initialise
from bench.predict.work import compute_recomputed_flops, compute_training_flops

CONF = Path(__file__).parents[3] / "conf" / "model"
PRESETS = sorted(path.stem for path in CONF.glob("*.yaml") if "family: t5\n" in path.read_text() or path.stem == "tiny")
SMALL = {
    "d_model": 48, "d_kv": 8, "d_ff": 80, "encoder_layers": 2, "decoder_layers": 3, "heads": 4, "vocab": 96,
    "gated": True, "activation": "gelu_new", "separate_head": True,
}  # fmt: skip


def preset(name: str) -> dict[str, Any]:
    return yaml.safe_load((CONF / f"{name}.yaml").read_text())


def spec_of(shape: dict[str, Any], model: dict[str, Any] | None = None, **rest: Any) -> RunSpec:
    named = {"name": "small", "shape": shape, **(model or {})}
    engine, data = {"name": "ddp", "backend": "ddp"}, {"name": "synthetic", "source": "synthetic"}
    return RunSpec.model_validate({"model": named, "engine": engine, "data": data, "batch": {"micro": 1}, **rest})


def initialised(spec: RunSpec) -> torch.nn.Module:
    module = build(spec)
    initialise(module, spec)
    return module


def loss_of(module: torch.nn.Module, encoder: int = 12, decoder: int = 7) -> torch.Tensor:
    tokens = torch.arange(2 * encoder).reshape(2, encoder) % 96
    return module(input_ids=tokens, labels=tokens[:, :decoder].contiguous()).loss


def counted_flops(module: torch.nn.Module, encoder: int, decoder: int) -> int:
    """Return the FLOPs of matrix products in forward and backward for one sample, counted by torch on the meta device.
    `encoder` and `decoder` are numbers of tokens."""
    # no mask, because transformers would read its values, which a meta tensor lacks
    inputs = torch.zeros(1, encoder, dtype=torch.long, device="meta")
    labels = torch.zeros(1, decoder, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        module(input_ids=inputs, labels=labels).loss.backward()
    return counter.get_total_flops()


# ------------------------------------------------------------------------------------------------- presets


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_its_stated_parameters_and_the_flops_counted_by_torch(name: str) -> None:
    """FLOPs are compared for a model of two encoder layers and one decoder layer. Each further layer has the same
    FLOPs."""
    model = preset(name)
    network = t5.stacks(t5.Shape.model_validate(model["shape"]))
    module = build(spec_of(model["shape"]), torch.device("meta"))
    published = model["parameters"]
    assert count_parameters(network) == sum(p.numel() for p in module.parameters()) == published
    few = model["shape"] | {"encoder_layers": 2, "decoder_layers": 1}
    counted = counted_flops(build(spec_of(few), torch.device("meta")), 512, 128)
    assert compute_training_flops(t5.stacks(t5.Shape.model_validate(few)), {"encoder": 512, "decoder": 128}) == counted


PRINTED = {
    # ByT5: arXiv 2105.13626, table 1. FLAN-T5: numbers on the Hugging Face Hub for google's weights.
    "byt5_small": 300e6, "byt5_base": 582e6, "byt5_large": 1.23e9, "byt5_xl": 3.74e9, "byt5_xxl": 12.9e9,
    "flan_t5_small": 77.0e6, "flan_t5_base": 248e6, "flan_t5_large": 783e6, "flan_t5_xl": 2.85e9,
}  # fmt: skip


@pytest.mark.parametrize("name", PRINTED)
def test_variants_have_the_published_numbers_of_parameters(name: str) -> None:
    model = preset(name)
    assert float(f"{model['parameters']:.3g}") == PRINTED[name]
    assert name.startswith("flan") or model["shape"]["encoder_layers"] == 3 * model["shape"]["decoder_layers"]


def test_ul2_has_twenty_billion_parameters() -> None:
    assert float(f"{preset('ul2')['parameters']:.1g}") == 20e9


@pytest.mark.parametrize("size", ["small", "base", "large", "xl", "xxl"])
def test_flan_t5_has_the_shape_of_t5_v1_1(size: str) -> None:
    assert preset(f"flan_t5_{size}")["shape"] == preset(f"t5_v1_1_{size}")["shape"]


@pytest.mark.parametrize("size", ["small", "base", "xl", "xxl"])
def test_umt5_is_mt5_with_a_larger_vocabulary_and_position_biases_in_every_layer(size: str) -> None:
    """umT5 has a table of position biases (32 × heads elements) in every layer. mT5 has only one table in the encoder
    and one in the decoder."""
    ours, mt5 = preset(f"umt5_{size}"), preset(f"mt5_{size}")
    more = 2 * (256_384 - 250_112) * ours["shape"]["d_model"]
    tables = 32 * ours["shape"]["heads"] * 2 * (ours["shape"]["encoder_layers"] - 1)
    assert ours["parameters"] == mt5["parameters"] + more + tables


UMT5 = SMALL | {"bias_per_layer": True}


@pytest.mark.parametrize("shape", [SMALL | {"encoder_layers": 6, "decoder_layers": 2}, UMT5], ids=["byt5", "umt5"])
@pytest.mark.parametrize("chunk", [None, 5])
def test_t5_variants_have_the_loss_of_transformers(shape: dict[str, Any], chunk: int | None) -> None:
    ours = initialised(spec_of(shape, {"loss_chunk_tokens": chunk}))
    sizes = {theirs: shape[name] for name, theirs in t5.shape.NAMES.items() if name in shape}
    config, kind = (UMT5Config, UMT5ForConditionalGeneration) if "bias_per_layer" in shape else (T5Config, None)
    untied = config(**sizes, feed_forward_proj="gated-gelu", dropout_rate=0, decoder_start_token_id=0)
    untied.tie_word_embeddings = untied.scale_decoder_outputs = False
    theirs = (kind or T5ForConditionalGeneration)(untied)
    theirs.load_state_dict(ours.state_dict())
    assert loss_of(ours).item() == pytest.approx(loss_of(theirs).item(), rel=1e-6)


def test_umt5_config_is_read_with_its_biases_and_its_head() -> None:
    saved = UMT5Config(d_model=768, d_ff=2048, num_layers=12, num_heads=12, vocab_size=256384).to_dict()
    assert t5.from_hugging_face(saved) == t5.Shape.model_validate(preset("umt5_base")["shape"])


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_umt5_has_the_same_gradients_with_checkpointing(attention: str) -> None:
    modules = [initialised(spec_of(UMT5, {"attention": attention}, activation_checkpointing=c)) for c in (False, True)]
    losses = [loss_of(module) for module in modules]
    torch.stack(losses).sum().backward()
    torch.testing.assert_close(losses[0], losses[1])
    for (name, plain), again in zip(modules[0].named_parameters(), modules[1].parameters(), strict=True):
        assert plain.grad is not None, name
        torch.testing.assert_close(plain.grad, again.grad, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", [*PRESETS, "hugging_face"])
def test_preset_has_its_file_name_a_source_and_no_dropout(name: str) -> None:
    model = preset(name)
    family = None if name == "hugging_face" else "t5"  # null: read from model_type in the config file
    assert (model["name"], model["family"], model["attention"], model["dropout"]) == (name, family, "sdpa", 0.0)
    assert model["source"]


# -------------------------------------------------------------------------------------------- closed forms

sizes = st.integers(1, 5).map(lambda n: 8 * n)
layers, lengths = st.integers(1, 3), st.integers(1, 40)
shapes = st.fixed_dictionaries(
    {"d_model": sizes, "d_kv": sizes, "d_ff": sizes, "encoder_layers": layers, "decoder_layers": layers}
    | {"heads": st.integers(1, 5), "vocab": sizes, "gated": st.booleans(), "separate_head": st.booleans()}
    | {"activation": st.sampled_from(["relu", "gelu_new", "silu"]), "bias_per_layer": st.booleans()}
).filter(lambda shape: shape["separate_head"] or not shape["bias_per_layer"])


@settings(max_examples=15)
@given(shapes, lengths, lengths)
def test_closed_forms_of_parameters_and_flops_hold_for_random_shapes_and_lengths(
    shape: dict[str, Any], encoder: int, decoder: int
) -> None:
    network, spec = t5.stacks(t5.Shape.model_validate(shape)), spec_of(shape, activation_checkpointing=True)
    module = build(spec, torch.device("meta"))
    assert count_parameters(network) == sum(p.numel() for p in module.parameters())
    sample = {"encoder": encoder, "decoder": decoder}
    hardware = compute_training_flops(network, sample) + compute_recomputed_flops(network, sample)
    assert hardware == counted_flops(module, encoder, decoder)


@pytest.mark.parametrize(("dropout", "precision"), [(0.0, "bf16"), (0.0, "fp16"), (0.1, "bf16")])
def test_recomputed_flops_equal_the_count_of_torch_for_each_dropout_and_precision(
    dropout: float, precision: str
) -> None:
    network, sample = t5.stacks(t5.Shape.model_validate(SMALL)), {"encoder": 12, "decoder": 7}
    module = build(spec_of(SMALL, {"dropout": dropout}, activation_checkpointing=True), torch.device("meta"))
    module.to({"bf16": torch.bfloat16, "fp16": torch.float16}[precision])
    recomputed = compute_recomputed_flops(network, sample, dropout=dropout, precision=precision)
    assert compute_training_flops(network, sample) + recomputed == counted_flops(module, 12, 7)


# ---------------------------------------------------------------------------------------------------- build


def test_separate_head_has_its_own_storage_after_tie_weights() -> None:
    module = build(spec_of(SMALL))
    module.tie_weights()
    shared = module.shared.weight.data_ptr()
    assert module.lm_head.weight.data_ptr() != shared
    assert [s.embed_tokens.weight.data_ptr() for s in (module.encoder, module.decoder)] == [shared, shared]
    assert module.config.scale_decoder_outputs is False


def test_tied_head_is_the_embedding_and_its_input_is_scaled() -> None:
    module = build(spec_of(SMALL | {"separate_head": False}))
    assert module.lm_head.weight is module.shared.weight is module.encoder.embed_tokens.weight
    assert module.config.scale_decoder_outputs is True
    assert "lm_head.weight" not in dict(module.named_parameters())


def test_sdpa_eager_attention_and_checkpointing_have_the_same_loss_and_gradients() -> None:
    variants = [{"attention": "sdpa"}, {"attention": "eager"}]
    specs = [spec_of(SMALL, v, activation_checkpointing=c) for v in variants for c in (False, True)]
    modules = [initialised(spec) for spec in specs]
    losses = torch.stack([loss_of(module) for module in modules])
    losses.sum().backward()
    assert torch.isfinite(losses).all()
    torch.testing.assert_close(losses, losses[:1].expand_as(losses), rtol=1e-5, atol=0)
    first = dict(modules[0].named_parameters())
    for module in modules[1:]:
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.grad, first[name].grad, rtol=1e-3, atol=1e-5)


def test_checkpointing_saves_fewer_elements_for_backward() -> None:
    def kept(checkpointing: bool) -> int:
        elements: list[int] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            elements.append(tensor.numel())
            return tensor

        module = initialised(spec_of(SMALL, activation_checkpointing=checkpointing))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss_of(module)
        return sum(elements)

    assert kept(True) < kept(False) / 2


# ----------------------------------------------------------------------------------------------- initialise


def test_initial_weights_of_a_spec_are_reproducible_and_depend_on_the_seed() -> None:
    first, again, other = (initialised(spec_of(SMALL, seed=seed)).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name in first if "norm" not in name]
    assert not any(torch.equal(first[name], other[name]) for name in drawn)


def test_parameters_of_equal_shape_have_different_initial_weights() -> None:
    block = initialised(spec_of(SMALL)).encoder.block
    assert not torch.equal(block[0].layer[0].SelfAttention.k.weight, block[1].layer[0].SelfAttention.k.weight)
    assert not torch.equal(block[0].layer[0].SelfAttention.k.weight, block[0].layer[0].SelfAttention.v.weight)


def test_initial_bf16_weights_are_the_rounded_fp32_weights() -> None:
    spec = spec_of(SMALL)
    whole, rounded = initialised(spec), build(spec).to(torch.bfloat16)
    initialise(rounded, spec)
    exact = whole.state_dict()
    assert all(torch.equal(value, exact[name].bfloat16()) for name, value in rounded.state_dict().items())


@pytest.mark.parametrize("separate_head", [True, False])
@pytest.mark.parametrize("gated", [True, False])
def test_initial_parameters_have_the_mean_and_deviation_of_transformers(gated: bool, separate_head: bool) -> None:
    shape = SMALL | {"d_model": 128, "d_ff": 160, "gated": gated, "separate_head": separate_head}
    ours = initialised(spec_of(shape))
    torch.manual_seed(0)
    theirs = dict(T5ForConditionalGeneration(ours.config).named_parameters())
    for name, parameter in ours.named_parameters():
        tolerance = 6 / (2 * parameter.numel()) ** 0.5  # six standard errors of a ratio of deviations
        spread, expected = parameter.std(correction=0).item(), theirs[name].std(correction=0).item()
        assert spread == pytest.approx(expected, rel=max(tolerance, 1e-6)), name
        assert parameter.mean().item() == pytest.approx(theirs[name].mean().item(), abs=6 * expected), name


def test_parameter_without_an_initialisation_rule_is_refused() -> None:
    spec = spec_of(SMALL)
    module = build(spec)
    module.adapter = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"adapter\.weight"):
        initialise(module, spec)


def test_each_parameter_is_gathered_before_its_initialisation() -> None:
    spec, seen = spec_of(SMALL), []

    class Whole:
        def __init__(self, parameters: Any) -> None:
            seen.extend(parameters)

        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    module = build(spec)
    initialise(module, spec, Whole)
    assert [id(p) for p in seen] == [id(p) for p in module.parameters()]


# -------------------------------------------------------------------------------------------- shape, config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_model": 0}, "d_model"),
        ({"width": 3}, "width"),
        ({"relative_attention_buckets": 2}, "at least 4"),
        ({"relative_attention_max_distance": 16}, "raise the first or lower the second"),
    ],
)
def test_impossible_shape_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        t5.Shape.model_validate(SMALL | change)


def test_config_saved_by_transformers_for_mt5_base_equals_the_preset(tmp_path: Path) -> None:
    base = {"d_model": 768, "d_ff": 2048, "num_layers": 12, "num_heads": 12, "tie_word_embeddings": False}
    MT5Config(**base).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert t5.from_hugging_face(saved) == t5.Shape.model_validate(preset("mt5_base")["shape"])


@pytest.mark.parametrize("name", ["t5_3b", "t5_v1_1_xl"])
def test_config_of_a_built_model_has_its_shape(name: str) -> None:
    shape = preset(name)["shape"]
    config = build(spec_of(shape), torch.device("meta")).config
    assert t5.from_hugging_face(config.to_dict()) == t5.Shape.model_validate(shape)


def test_defaults_of_an_old_t5_config_are_ungated_relu_tied_head_and_equal_layers() -> None:
    old = {"model_type": "t5", "d_model": 64, "d_kv": 8, "d_ff": 96, "num_layers": 3, "num_heads": 2,
           "vocab_size": 100}  # fmt: skip
    shape = t5.from_hugging_face(old)
    assert (shape.gated, shape.activation, shape.separate_head) == (False, "relu", False)
    assert shape.decoder_layers == 3


@pytest.mark.parametrize("chunk", ["null", "5"])
@pytest.mark.parametrize("theirs", [(T5Config, T5ForConditionalGeneration), (MT5Config, MT5ForConditionalGeneration)])
def test_head_that_transformers_5_ties_is_tied_and_not_scaled(tmp_path: Path, theirs: Any, chunk: str) -> None:
    """transformers 5 ties the head of a new model even if its config has tie_word_embeddings=false. Only the file of
    weights shows that the head is tied: the file contains no head."""
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
    rest = {"decoder_start_token_id": 0, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    theirs[1](theirs[0](**sizes, **rest)).save_pretrained(tmp_path)
    words = ["model=hugging_face", f"model.checkpoint={tmp_path}", f"model.loss_chunk_tokens={chunk}", "machine=cpu"]
    spec = compose.compose_request(compose.parse_single(words)).spec
    assert (spec.model.shape["separate_head"], spec.model.shape["scaled_head"]) == (False, False)
    ours = build(spec)
    load_weights(ours, spec, whole, tmp_path, is_main=True)
    expected = loss_of(theirs[1].from_pretrained(tmp_path).eval())
    # there is no dropout, and a chunked head computes its loss only in training
    assert loss_of(ours.train()).item() == pytest.approx(expected.item(), rel=1e-6)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "umt5", "d_model": 8}, "umt5 config: lacks d_kv"),
        ({"model_type": "longt5"}, "model_type=longt5"),
        ({"model_type": "t5", "d_model": 8}, "lacks d_kv, d_ff, num_layers, num_heads, vocab_size"),
        (T5Config(feed_forward_proj="gated-swish").to_dict(), "feed_forward_proj=gated-swish"),
    ],
)
def test_unsupported_configs_are_refused_in_one_line(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        t5.from_hugging_face(config)


@pytest.mark.parametrize("name", ["umt5_small", "mt5_small", "t5_3b"])
def test_fsdp_units_have_every_parameter_once(name: str) -> None:
    """The division into FSDP units must handle both kinds of position biases. umT5 has a table of position biases in
    every layer. mT5 and T5 have only one table in the encoder and one in the decoder."""
    model = preset(name)
    network = t5.stacks(t5.Shape.model_validate(model["shape"]))
    assert sum(unit.elements for unit in units(network)) == count_parameters(network)
