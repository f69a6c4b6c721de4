"""Tests of decoder-only models. They must compute the same as transformers' GPT-2 and Llama. Their parameters and the
FLOPs that torch counts must equal our closed forms."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import ValidationError
from saved_tensors import kept_by_autograd
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from bench import models
from bench.config import compose
from bench.core.errors import UserError
from bench.core.network import count_parameters, list_modules, list_tensors
from bench.core.spec import RunSpec
from bench.models import gpt
from bench.models.gpt.build import build, initialise, stored_form
from bench.predict.memory import activations
from bench.predict.work import compute_recomputed_flops, compute_training_flops
from bench.predict.workload import build_workload

CONF = Path(__file__).parents[3] / "conf" / "model"
PRESETS = sorted(path.stem for path in CONF.glob("*.yaml") if "family: gpt\n" in path.read_text())
PUBLISHED = {
    # numbers of parameters on the models' pages of the Hugging Face Hub
    "gpt2": 124_439_808,
    "gpt2_medium": 354_823_168,
    "gpt2_large": 774_030_080,
    "gpt2_xl": 1_557_611_200,
    "llama_2_7b": 6_738_415_616,
    "llama_2_13b": 13_015_864_320,
    "llama_3_8b": 8_030_261_248,
}
NAMED = {"gpt3_2_7b": 2.7e9, "gpt_22b": 22e9, "gpt_175b": 175e9, "gpt_1t": 1e12}
"""Approximate numbers of parameters, for models whose names in papers contain them."""
GPT2 = {"width": 48, "layers": 3, "heads": 4, "inner": 192, "vocab": 96, "positions": 64}
LLAMA = {
    "width": 48, "layers": 3, "heads": 4, "inner": 80, "vocab": 96, "positions": 64, "key_heads": 2, "head_width": 10,
    "norm": "rms", "norm_eps": 1e-6, "activation": "silu", "gated": True, "biases": False, "fused": False,
    "separate_head": True, "scaled_residuals": False, "rotary_base": 10_000.0,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {"gpt2": GPT2, "llama": LLAMA}
SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_positions": 16}
TOKENS = 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SMALL_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 96, "n_positions": 64},
    "llama": {
        "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 10,
        "intermediate_size": 80, "vocab_size": 96, "max_position_embeddings": 64,
    },
}  # fmt: skip


def spec_of(shape: dict[str, Any], model: dict[str, Any] | None = None, **rest: Any) -> RunSpec:
    return RunSpec.model_validate({
        "model": {"name": "small", "family": "gpt", "shape": shape, **(model or {})},
        "engine": {"name": "ddp", "backend": "ddp"}, "data": {"name": "synthetic", "source": "synthetic"},
        "objective": "causal_lm", "sequence": {"tokens": TOKENS}, "batch": {"micro": 3}, "precision": "fp32", **rest,
    })  # fmt: skip


def initialised(spec: RunSpec) -> Any:
    module = build(spec)
    initialise(module, spec)
    return module


def sample(samples: int = 3) -> torch.Tensor:
    return torch.randint(2, 96, (samples, TOKENS), generator=torch.Generator().manual_seed(7))


def loss_of(model: Any, samples: int = 3, **more: Any) -> torch.Tensor:
    tokens = sample(samples)
    found: torch.Tensor = model(input_ids=tokens, labels=tokens, **more).loss
    return found


# ------------------------------------------------------------------------------------------------- presets


@pytest.mark.parametrize("name", PRESETS)
def test_preset_has_its_stated_parameters_and_the_flops_counted_by_torch(name: str) -> None:
    """FLOPs are compared for a model of two layers with eager attention. A fused kernel would recompute the attention
    scores in backward. Model FLOPs do not include this recomputation."""
    model = yaml.safe_load((CONF / f"{name}.yaml").read_text())
    whole = spec_of(model["shape"])
    built, described = build(whole, torch.device("meta")), models.build_network(whole.model)
    assert described
    assert count_parameters(described) == sum(p.numel() for p in built.parameters()) == model["parameters"]
    spec = spec_of(model["shape"] | {"layers": 2}, {"attention": "eager"})
    module, network = build(spec, torch.device("meta")), models.build_network(spec.model)
    assert network
    tokens = torch.zeros(1, 1024, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter:
        module(input_ids=tokens, labels=tokens).loss.backward()
    assert compute_training_flops(network, {"tokens": 1024}) == counter.get_total_flops()
    assert model["name"] == name and model["source"] and model["dropout"] == 0.0


def test_presets_have_the_published_numbers_of_parameters() -> None:
    counts = {name: yaml.safe_load((CONF / f"{name}.yaml").read_text())["parameters"] for name in PRESETS}
    assert {name: counts[name] for name in PUBLISHED} == PUBLISHED
    assert {name: counts[name] for name in NAMED} == {name: pytest.approx(n, rel=0.02) for name, n in NAMED.items()}


def test_gpt_175b_has_the_number_of_parameters_in_frontiers_log() -> None:
    """TOTAL_PARAMS in the log is a sum over the ranks: 16 pipeline stages with four tensor-parallel ranks each. The sum
    counts some parameters several times. The four ranks each hold whole norms, whole positions, and the whole biases
    that are added after an all-reduce. The first and the last stage both hold the embedding."""
    shape = gpt.Shape.model_validate(yaml.safe_load((CONF / "gpt_175b.yaml").read_text())["shape"])
    whole_on_each = shape.layers * 6 * shape.width + shape.positions * shape.width + 2 * shape.width
    counted = count_parameters(gpt.stacks(shape)) + 3 * whole_on_each + shape.vocab * shape.width
    assert counted == 175_429_877_760


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_evaluation_has_no_dropout_and_draws_no_random_numbers(kind: str, attention: str, checkpointing: bool) -> None:
    """In evaluation mode, the loss equals that of the same weights without dropout. The next training step draws the
    same random numbers as without the evaluation."""
    dropping, whole = (
        initialised(
            spec_of(SHAPES[kind], {"attention": attention, "dropout": p}, activation_checkpointing=checkpointing)
        )
        for p in (0.5, 0.0)
    )
    trained = {loss_of(dropping).item() for _ in range(3)}
    assert len(trained) == 3
    before = torch.get_rng_state()
    with torch.no_grad():
        assert loss_of(dropping.eval()).item() == loss_of(whole).item() not in trained
    assert torch.equal(torch.get_rng_state(), before)


# ---------------------------------------------------------------------------------- what transformers computes


def theirs_of(kind: str, **more: Any) -> Any:
    torch.manual_seed(3)
    if kind == "gpt2":
        off = {"attn_pdrop": 0, "embd_pdrop": 0, "resid_pdrop": 0}
        model: Any = GPT2LMHeadModel(GPT2Config(**SMALL_CONFIGS["gpt2"], **off, **more))
    else:
        model = LlamaForCausalLM(LlamaConfig(**SMALL_CONFIGS["llama"], **more))
    with torch.no_grad():  # norms and biases have equal initial values, which would hide a mix-up
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def take_weights(ours: Any, theirs: Any) -> None:
    """Copy the weights of a transformers model (`theirs`) to our model."""
    spec, stored = spec_of(gpt.from_hugging_face(theirs.config.to_dict()).model_dump()), theirs.state_dict()
    forms = {name: stored_form(spec, name) for name in ours.state_dict()}
    ours.load_state_dict({name: form.from_stored(stored[form.name]) for name, form in forms.items()})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["gpt2", "llama", "llama3"])
def test_logits_and_loss_equal_those_of_transformers(kind: str, attention: str) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    more = {"rope_parameters": {**rope, "original_max_position_embeddings": 16}} if kind == "llama3" else {}
    theirs = theirs_of(kind, attn_implementation=attention, **more)
    shape = gpt.from_hugging_face(theirs.config.to_dict())
    ours = build(spec_of(shape.model_dump(), {"attention": attention}))
    take_weights(ours, theirs)
    found: Any = ours
    tokens = sample()
    torch.testing.assert_close(
        found.lm_head(found.model(tokens)), theirs(input_ids=tokens).logits, rtol=1e-5, atol=1e-5
    )
    assert loss_of(ours).item() == pytest.approx(loss_of(theirs).item(), rel=1e-6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_attention_does_not_cross_documents_of_a_sample_as_in_transformers(kind: str, attention: str) -> None:
    theirs = theirs_of(kind, attn_implementation=attention)
    ours: Any = build(spec_of(gpt.from_hugging_face(theirs.config.to_dict()).model_dump(), {"attention": attention}))
    take_weights(ours, theirs)
    places = torch.cat([torch.arange(8), torch.arange(12)]).expand(3, TOKENS)
    assert loss_of(ours, position_ids=places).item() == pytest.approx(
        loss_of(theirs, position_ids=places, use_cache=False).item(), rel=1e-6
    )
    tokens = sample()
    apart = torch.cat([ours.model(tokens[:, :8]), ours.model(tokens[:, 8:])], dim=1)
    torch.testing.assert_close(ours.model(tokens, places), apart, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_transformers_config_is_read_with_its_rotary_scaling(kind: str) -> None:
    plain = {"model_type": kind, **SMALL_CONFIGS[kind]}
    assert gpt.from_hugging_face(plain) == gpt.Shape.model_validate(SHAPES[kind])
    assert models.find_family(plain) == "gpt"
    if kind == "llama":
        old = {"rope_theta": 5e5, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }}  # fmt: skip
        read = gpt.from_hugging_face(plain | old)
        assert read.rotary_base == 5e5 and read.rotary_scaling and read.rotary_scaling.model_dump() == SCALING


# -------------------------------------------------------------------------------------------- closed forms


@pytest.mark.parametrize("kind", SHAPES)
def test_described_modules_have_the_built_parameters_in_the_same_order(kind: str) -> None:
    spec = spec_of(SHAPES[kind])
    described = models.build_network(spec.model)
    assert described
    sizes = {module.weight: list_tensors(described)[module.size].elements for module in list_modules(described)}
    sizes.pop(None)
    names = [name for name, _ in build(spec).named_parameters()]
    built = dict(build(spec).named_parameters())
    assert list(sizes.values()) == [built[name].numel() for name in names]


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("kind", SHAPES)
def test_flops_equal_the_count_of_torch(kind: str, dropout: float, checkpointing: bool) -> None:
    spec = spec_of(SHAPES[kind], {"attention": "eager", "dropout": dropout}, activation_checkpointing=checkpointing)
    described = models.build_network(spec.model)
    assert described
    model = initialised(spec)
    with FlopCounterMode(display=False) as counter:
        loss_of(model, 1).backward()
    again = (
        compute_recomputed_flops(described, spec.sequence, dropout=dropout, precision="fp32") if checkpointing else 0
    )
    assert compute_training_flops(described, spec.sequence) + again == counter.get_total_flops()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", SHAPES)
def test_activation_bytes_equal_the_tensors_saved_by_autograd(
    kind: str, precision: str, attention: str, dropout: float, checkpointing: bool
) -> None:
    spec = spec_of(
        SHAPES[kind], {"attention": attention, "dropout": dropout}, precision=precision,
        activation_checkpointing=checkpointing,
    )  # fmt: skip
    built = initialised(spec).to(DTYPES[precision])
    described = models.build_network(spec.model)
    assert described
    segments = activations.list_segments(described, build_workload(spec, "cpu"))
    saved = sum(segment.saved * times for block, times in segments for segment in block)
    width = 4 if precision == "fp32" else 2
    # a checkpoint keeps random state, cosines and sines, which autograd does not count as saved tensors
    if checkpointing:
        saved -= 3 * activations.RANDOM_STATE["cpu"] + (2 * TOKENS * 10 * width if kind == "llama" else 0)
    # the mask that eager attention adds in all blocks, and that each checkpoint keeps, is not predicted
    mask = width * TOKENS * TOKENS if checkpointing and attention == "eager" else 0
    divisor = 4  # bytes of the loss's divisor, one fp32 number
    assert kept_by_autograd(built, lambda: loss_of(built)) == saved + mask + divisor


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", SHAPES)
def test_activation_bytes_with_separate_documents_equal_the_tensors_saved_by_autograd(
    kind: str, checkpointing: bool, attention: str
) -> None:
    spec = spec_of(
        SHAPES[kind], {"attention": attention}, objective="causal_lm_documents", activation_checkpointing=checkpointing
    )
    built, described = initialised(spec), models.build_network(spec.model)
    assert described
    segments = activations.list_segments(described, build_workload(spec, "cpu"))
    saved = sum(segment.saved * times for block, times in segments for segment in block)
    if checkpointing:
        saved -= 3 * activations.RANDOM_STATE["cpu"] + (2 * 3 * TOKENS * 10 * 4 if kind == "llama" else 0)
    places = torch.cat([torch.arange(8), torch.arange(12)]).repeat(3, 1)
    assert kept_by_autograd(built, lambda: loss_of(built, position_ids=places)) == saved + 4


# ---------------------------------------------------------------------------------------------- variants


@pytest.mark.parametrize("kind", SHAPES)
def test_attention_kernels_checkpointing_and_chunked_loss_have_the_same_gradients(kind: str) -> None:
    variants: list[tuple[dict[str, Any], bool]] = [
        ({"attention": "sdpa"}, False), ({"attention": "eager"}, False), ({"attention": "sdpa"}, True),
        ({"loss_chunk_tokens": 7}, False),
    ]  # fmt: skip
    built = [initialised(spec_of(SHAPES[kind], model, activation_checkpointing=again)) for model, again in variants]
    losses = torch.stack([loss_of(module) for module in built])
    losses.sum().backward()
    torch.testing.assert_close(losses, losses[:1].expand_as(losses), rtol=1e-6, atol=0)
    first = dict(built[0].named_parameters())
    for module in built[1:]:
        for name, parameter in module.named_parameters():
            torch.testing.assert_close(parameter.grad, first[name].grad, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", SHAPES)
def test_initial_parameters_have_the_mean_and_deviation_of_transformers(kind: str) -> None:
    """Standard deviations differ between parameters: those of GPT-2's residual matrices are smaller. The matrices are
    large enough to estimate them."""
    torch.manual_seed(0)
    theirs: Any = (
        GPT2LMHeadModel(GPT2Config(**{**SMALL_CONFIGS["gpt2"], "n_embd": 128}))
        if kind == "gpt2"
        else LlamaForCausalLM(LlamaConfig(**{**SMALL_CONFIGS["llama"], "hidden_size": 128}))
    )
    spec = spec_of(gpt.from_hugging_face(theirs.config.to_dict()).model_dump())
    ours, drawn = build(spec), initialised(spec).state_dict()
    take_weights(ours, theirs)
    for name, parameter in ours.state_dict().items():
        expected = parameter.std(correction=0).item()
        tolerance = 6 / parameter.numel() ** 0.5
        assert drawn[name].std(correction=0).item() == pytest.approx(expected, rel=max(tolerance, 1e-6)), name
        assert drawn[name].mean().item() == pytest.approx(parameter.mean().item(), abs=expected), name


def test_initial_weights_depend_on_seed_and_name_and_not_on_precision() -> None:
    exact, again, other = (initialised(spec_of(LLAMA, seed=seed)).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(exact[name], again[name]) for name in exact)
    assert not any(torch.equal(exact[name], other[name]) for name in exact if "norm" not in name)
    rounded = build(spec_of(LLAMA, seed=3)).to(torch.bfloat16)
    initialise(rounded, spec_of(LLAMA, seed=3))
    assert all(torch.equal(value, exact[name].bfloat16()) for name, value in rounded.state_dict().items())


# ---------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "heads=5 does not divide width=48"),
        ({"key_heads": 3}, "key_heads=3 does not divide heads=4"),
        ({"key_heads": 2}, "a fused matrix needs"),
        ({"rotary_base": 1e4, "head_width": 7}, "head_width=7 is odd"),
        ({"rotary_scaling": SCALING}, "rotary_scaling needs rotary_base"),
        ({"width": 0}, "width"),
    ],
)
def test_impossible_shape_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        gpt.Shape.model_validate(GPT2 | change)


@pytest.mark.parametrize(
    ("plain", "message"),
    [
        ({"model_type": "opt"}, "model_type=opt: not of the family built here; give one of gpt2, llama"),
        ({"model_type": "gpt2", "n_embd": 8}, "gpt2 config: lacks n_layer, n_head, vocab_size"),
        ({"model_type": "gpt2", "reorder_and_upcast_attn": True}, "choose model.family=hugging_face"),
        ({"model_type": "llama", "attention_bias": True}, "attention_bias=True: this llama is not built here"),
        (
            {"model_type": "llama", **SMALL_CONFIGS["llama"], "rope_scaling": {"rope_type": "yarn"}},
            "rope_type=yarn: this rotation is not built here",
        ),
    ],
)
def test_unsupported_configs_are_refused_in_one_line(plain: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        gpt.from_hugging_face(plain)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("sequence.tokens=2048",),
            "sequence.tokens=2048: the model has 1024 positions; set sequence.tokens=1024 or"
            " less, or raise model.shape.positions$",
        ),
        (("model.attention=flex", "machine=h100"), "model.attention=flex: family gpt has no position bias to add"),
    ],
)
def test_unsupported_requests_for_a_decoder_only_model_are_refused(words: tuple[str, ...], message: str) -> None:
    asked = compose.compose_request(
        compose.parse_single(["model=gpt2_tiny", "objective=causal_lm", "devices_per_node=1", *words])
    )
    with pytest.raises(UserError, match=message):
        compose.check(asked, "cuda")
