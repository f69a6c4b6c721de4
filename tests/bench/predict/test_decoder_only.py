"""Tests of predictions for a model other than T5. They are compared with the GPT-2 of transformers."""

from collections import Counter
from typing import Any

import pytest
import torch
from saved_tensors import kept_by_autograd
from torch.utils.flop_counter import FlopCounterMode
from transformers import GPT2Config, GPT2LMHeadModel

from bench import models
from bench.config import compose
from bench.core.errors import NoPrediction
from bench.core.network import (
    Attention,
    Mlp,
    Stack,
    Stacks,
    count_parameters,
    list_matrices,
    list_modules,
    list_tensors,
)
from bench.core.spec import Precision, RunSpec
from bench.predict.memory import activations, predict_memory
from bench.predict.work import compute_flops_per_step, compute_recomputed_flops, compute_training_flops
from bench.predict.workload import Workload

TOKENS = 20
SMALL = {"layers": 3, "width": 48, "heads": 4, "vocab": 96, "positions": 64}
WIDTH = {"fp32": 4, "bf16": 2}


def network(layers: int, width: int, heads: int, vocab: int, positions: int) -> Stacks:
    attention = Attention(heads, width // heads, causal=True, fused=True, biases=True)
    block = (attention, Mlp(4 * width, "gelu_new", biases=True))
    stack = Stack("decoder", "tokens", layers, block, positions)
    return Stacks(vocab, width, (stack,), tied=True, norm="layer", full_loss=True, discarded=vocab * width)


def built(attention: str = "eager", dropout: float = 0.0, *, checkpointing: bool = False, **more: Any) -> Any:
    config = GPT2Config(
        vocab_size=96, n_positions=64, n_embd=48, n_layer=3, n_head=4, bos_token_id=0, eos_token_id=0, use_cache=False,
        attn_implementation=attention, resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout, **more,
    )  # fmt: skip
    model = GPT2LMHeadModel(config).train()
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def loss(model: torch.nn.Module, samples: int) -> torch.Tensor:
    tokens = torch.arange(samples * TOKENS).reshape(samples, TOKENS) % 96
    found: torch.Tensor = model(input_ids=tokens, labels=tokens).loss
    return found


def test_parameters_of_gpt2_equal_the_published_number_and_transformers_model() -> None:
    with torch.device("meta"):
        built = sum(parameter.numel() for parameter in GPT2LMHeadModel(GPT2Config()).parameters())
    assert count_parameters(network(12, 768, 12, 50257, 1024)) == built == 124_439_808


def test_described_modules_have_the_parameters_of_transformers_in_the_same_order() -> None:
    described = network(**SMALL)
    sizes = {module.weight: list_tensors(described)[module.size].elements for module in list_modules(described)}
    sizes.pop(None)
    assert list(sizes.values()) == [parameter.numel() for parameter in built().parameters()]
    counted = Counter(sizes.values())
    assert [counted[size.elements] for size in list_tensors(described)] == [
        size.number for size in list_tensors(described)
    ]


def test_described_matrices_are_those_of_projections_and_head() -> None:
    shapes = {
        tuple(p.shape) for name, p in built().named_parameters() if name.endswith((".c_fc.weight", "attn.weight"))
    }
    shapes |= {tuple(p.shape) for name, p in built().named_parameters() if name.endswith("c_proj.weight")}
    assert list_matrices(network(**SMALL)) == {*shapes, (48, 96)}


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_flops_of_a_sample_equal_the_count_of_torch(dropout: float, checkpointing: bool) -> None:
    """Attention is eager. A fused kernel would recompute the attention scores in backward. Model FLOPs do not include
    this recomputation."""
    described, sample = network(**SMALL), {"tokens": TOKENS}
    model = built(dropout=dropout, checkpointing=checkpointing)
    with FlopCounterMode(display=False) as counter:
        loss(model, 1).backward()
    again = compute_recomputed_flops(described, sample, dropout=dropout) if checkpointing else 0
    assert compute_training_flops(described, sample) + again == counter.get_total_flops()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_activation_bytes_equal_the_tensors_saved_by_autograd(
    precision: Precision, attention: Any, dropout: float, checkpointing: bool
) -> None:
    model = built(attention, dropout, checkpointing=checkpointing)
    model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    load = Workload(
        3, (("tokens", TOKENS),), WIDTH[precision], attention, dropout > 0, checkpointing, "cpu", False, None
    )
    described = activations.list_segments(network(**SMALL), load)
    saved = sum(segment.saved * times for block, times in described for segment in block)
    if checkpointing:  # a checkpoint keeps its random state, but not as a tensor that autograd saves
        saved -= 3 * activations.RANDOM_STATE["cpu"]
    # eager attention adds a mask in all blocks, and each checkpoint keeps the mask: it is not predicted
    mask = WIDTH[precision] * 3 * TOKENS * TOKENS if checkpointing and attention == "eager" else 0
    divisor = 4  # divisor of the loss, one number
    assert kept_by_autograd(model, lambda: loss(model, 3)) == saved + mask + divisor


# ---------------------------------------------------------------------------------------------- through every engine


def spec_of(engine: str, **more: Any) -> RunSpec:
    asked = compose.compose_request(
        compose.parse_single([f"engine={engine}", "devices_per_node=4", "launcher=slurm"])
    ).spec
    return RunSpec.model_validate({
        "model": {"name": "gpt2", "family": "gpt2", "shape": {}},
        "engine": asked.engine,
        "data": {"name": "synthetic", "source": "synthetic"}, "objective": "causal_lm", "sequence": {"tokens": 1024},
        "batch": {"micro": 4}, "devices_per_node": 4, **more,
    })  # fmt: skip


@pytest.fixture
def gpt2(monkeypatch: pytest.MonkeyPatch) -> Stacks:
    described = network(12, 768, 12, 50257, 1024)
    monkeypatch.setattr(models, "build_network", lambda model: described)
    return described


@pytest.mark.parametrize("engine", ["ddp", "zero0", "zero1", "zero2", "zero3"])
def test_described_family_is_predicted_with_every_engine(engine: str, gpt2: Stacks) -> None:
    spec = spec_of(engine)
    needed = predict_memory(spec, "cuda")
    assert all(size >= 0 for phase in needed.phases for size in phase.terms.values())
    whole = 2 * 124_439_808  # in bf16; stage 3 keeps a quarter of each large tensor, and all of each small tensor
    expected = whole / 4 if engine == "zero3" else whole
    assert needed.phases[1].terms["weights"] == pytest.approx(expected, rel=0.01)
    # PaLM's rule: 6 FLOPs per parameter and token, 12 × layers × width × tokens per token for attention's squares
    rule = 1024 * (6 * (124_439_808 - 1024 * 768) + 12 * 12 * 768 * 1024)
    assert compute_flops_per_step(spec).model == pytest.approx(16 * rule, rel=0.002)


def test_logits_and_loss_of_gpt2_equal_a_calculation_by_hand(gpt2: Stacks) -> None:
    """In fp32, the logits of 4 × 1,024 tokens and 50,257 vocabulary entries take 0.82 GB. The log-probabilities and two
    gradients take as much each."""
    (backward,) = (phase for phase in predict_memory(spec_of("ddp"), "cuda").phases if phase.name == "backward")
    assert backward.terms["logits and loss"] == pytest.approx(3 * 4 * 4096 * 50257, rel=0.001)


def test_undescribed_network_is_not_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "build_network", lambda model: None)
    for predicted in (compute_flops_per_step, predict_memory):
        with pytest.raises(NoPrediction, match=r"model\.family=gpt2: no prediction"):
            predicted(spec_of("ddp"))


def test_missing_kind_of_tokens_is_refused(gpt2: Stacks) -> None:
    spec = spec_of("ddp", objective="span_corruption", sequence={"encoder": 512, "decoder": 128})
    with pytest.raises(NoPrediction, match="tokens of kind tokens: no prediction: a sample has encoder, decoder"):
        compute_flops_per_step(spec)
