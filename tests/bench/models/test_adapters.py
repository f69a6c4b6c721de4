"""Tests of adapters. Our models with adapters must compute the same as transformers' models with peft's adapters.
Quantised matrices must compute the same as their dequantised values. Unsupported adapters must be refused."""

import sys
from typing import Any

import pytest
import test_gpt
import test_t5
import torch
from bitsandbytes.functional import dequantize_4bit
from bitsandbytes.nn import Linear4bit, Linear8bitLt
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from bench import engines
from bench.core.errors import UserError
from bench.core.spec import AdapterSpec, RunSpec
from bench.models import gpt
from bench.models.gpt.build import build as build_gpt
from bench.models.modules.adapters import _pack, adapt, list_matrices
from bench.models.t5.build import build as build_t5

LORA: dict[str, Any] = {"name": "lora", "rank": 4, "alpha": 12}
NF4 = LORA | {"quantization": "nf4"}
DDP = engines.load_builder("ddp")
THEIR_NAMES = {"qkv_proj": "c_attn", "o_proj": "c_proj", "up_proj": "c_fc", "down_proj": "c_proj"}
"""Names of GPT-2's matrices in this project's model, mapped to their names in transformers."""


def put(module: nn.Module, spec: RunSpec, **adapter: Any) -> Any:
    """Add adapters to the module and return it. `adapter` are the fields of AdapterSpec, such as `rank`."""
    return adapt(module, spec.model_copy(update={"adapter": AdapterSpec(**adapter)}), DDP)


def list_adapters(module: nn.Module) -> list[tuple[str, Tensor, Tensor]]:
    """Return the name and the two matrices (A and B) of each adapter, in the order of the model's layers."""
    return [
        (name, layer.lora_A.default.weight, layer.lora_B.default.weight)
        for name, layer in module.named_modules()
        if hasattr(layer, "lora_A")
    ]


def by_head(rows: Tensor, name: str, heads: int = 4) -> Tensor:
    """Convert rows from the order of transformers' fused matrix `c_attn` to the order of our fused matrix.

    transformers has the queries of all heads, then the keys, then the values. Ours has query, key and value of the
    first head, then those of the second head. Rows of other matrices (by `name`) are returned unchanged.
    """
    return rows.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2) if name.endswith("c_attn") else rows


def by_kind(rows: Tensor, name: str, heads: int = 4) -> Tensor:
    """Convert rows from the order of our fused matrix to that of transformers' `c_attn`. This is the inverse of
    `by_head`."""
    return rows.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2) if name.endswith("c_attn") else rows


def check_equal(ours: nn.Module, theirs: nn.Module, compute_loss: Any) -> None:
    """Copy the adapters of our model to the transformers model. Check that both models then have the same loss and the
    same gradients of the adapters."""
    torch.manual_seed(1)
    pairs = list(zip(list_adapters(ours), list_adapters(theirs), strict=True))
    with torch.no_grad():
        for (_, first, second), (name, their_first, their_second) in pairs:
            their_first.copy_(first)
            second.normal_(0, 0.1)  # the second matrix is zero at first, which makes the gradient of the first zero
            their_second.copy_(by_kind(second, name))
    loss, expected = compute_loss(ours), compute_loss(theirs)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    assert all(parameter.grad is None for parameter in ours.parameters() if not parameter.requires_grad)
    for (_, first, second), (name, their_first, their_second) in pairs:
        assert first.grad is not None and second.grad is not None and their_second.grad is not None
        assert first.grad.abs().max() > 0
        torch.testing.assert_close(first.grad, their_first.grad, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(second.grad, by_head(their_second.grad, name), rtol=1e-5, atol=1e-5)


def peft_of(model: Any, targets: list[str]) -> nn.Module:
    config = LoraConfig(r=LORA["rank"], lora_alpha=LORA["alpha"], target_modules=targets)
    found: nn.Module = get_peft_model(model, config)
    return found


@pytest.mark.parametrize("targets", [["qkv_proj"], []], ids=["attention", "all"])
@pytest.mark.parametrize("chunk", [None, 7])
def test_gpt2_with_adapters_has_the_loss_and_gradients_of_peft(targets: list[str], chunk: int | None) -> None:
    """Our fused matrix of queries, keys and values corresponds to `c_attn` in transformers. In both models, one adapter
    serves the whole fused matrix."""
    theirs = test_gpt.theirs_of("gpt2")
    spec = test_gpt.spec_of(gpt.from_hugging_face(theirs.config.to_dict()).model_dump(), {"loss_chunk_tokens": chunk})
    ours = build_gpt(spec)
    test_gpt.take_weights(ours, theirs)
    put(ours, spec, **LORA, targets=targets)
    their_names = [THEIR_NAMES[name] for name in targets or THEIR_NAMES]
    check_equal(ours, peft_of(theirs, their_names), test_gpt.loss_of)


@pytest.mark.parametrize("targets", [["q_proj", "v_proj"], []], ids=["attention", "all"])
def test_llama_with_adapters_has_the_loss_and_gradients_of_peft(targets: list[str]) -> None:
    theirs = test_gpt.theirs_of("llama")
    spec = test_gpt.spec_of(gpt.from_hugging_face(theirs.config.to_dict()).model_dump(), activation_checkpointing=True)
    ours = build_gpt(spec)
    test_gpt.take_weights(ours, theirs)
    put(ours, spec, **LORA, targets=targets)
    mlp = ["gate_proj", "up_proj", "down_proj"]
    check_equal(ours, peft_of(theirs, targets or ["q_proj", "k_proj", "v_proj", "o_proj", *mlp]), test_gpt.loss_of)


@pytest.mark.parametrize("targets", [["q", "wo"], []], ids=["two", "all"])
def test_t5_with_adapters_has_the_loss_and_gradients_of_peft(targets: list[str]) -> None:
    spec = test_t5.spec_of(test_t5.SMALL, precision="fp32")
    ours, theirs = test_t5.initialised(spec), build_t5(spec)
    theirs.load_state_dict(ours.state_dict())
    put(ours, spec, **LORA, targets=targets)
    check_equal(ours, peft_of(theirs, targets or ["q", "k", "v", "o", "wi_0", "wi_1", "wo"]), test_t5.loss_of)


def test_initial_adapter_weights_have_pefts_distribution_and_depend_on_the_name() -> None:
    spec = test_t5.spec_of(test_t5.SMALL, precision="fp32")
    one, other = (put(test_t5.initialised(spec), spec, **LORA, targets=targets) for targets in (["q", "v"], ["q"]))
    ours = {name: weights for name, *weights in list_adapters(one)}
    for name, first, second in list_adapters(other):
        assert torch.equal(first, ours[name][0]), "the choice of other matrices changes nothing"
        assert second.abs().max() == 0
    drawn = torch.cat([first.flatten() for _, first, _ in list_adapters(one)])
    theirs = peft_of(test_t5.initialised(spec), ["q", "v"])
    expected = torch.cat([first.flatten() for _, first, _ in list_adapters(theirs)])
    assert drawn.std().item() == pytest.approx(expected.std().item(), rel=0.05)
    assert 0.99 * 48**-0.5 < drawn.abs().max() <= 48**-0.5
    assert 0.99 * 48**-0.5 < expected.abs().max() <= 48**-0.5


# ---------------------------------------------------------------------------------- quantised weights


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nf4_matrix_computes_the_same_as_its_dequantised_weights(dtype: torch.dtype, double: bool) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(256, 1024, dtype=dtype)
    packed: Any = _pack(plain, AdapterSpec(**NF4, double_quantization=double))
    inputs, again = (torch.randn(2, 5, 256, dtype=dtype, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    found, weight = packed(inputs.requires_grad_()), dequantize_4bit(packed.weight.data, packed.quant_state)
    expected = nn.functional.linear(again.requires_grad_(), weight, plain.bias)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    expected.sum().backward()
    torch.testing.assert_close(inputs.grad, again.grad)
    assert 0.01 < (weight - plain.weight).norm() / plain.weight.norm() < 0.15
    state = packed.quant_state
    scales = [state.absmax, *([state.state2.absmax] if double else [])]
    bits = 8 * sum(tensor.nbytes for tensor in (packed.weight, *scales)) / plain.weight.numel()
    assert bits == pytest.approx(4.127 if double else 4.5, abs=5e-4)


@pytest.mark.parametrize(("form", "kind", "distance"), [("nf4", Linear4bit, 0.1), ("int8", Linear8bitLt, 0.01)])
def test_quantised_t5_keeps_wo_head_and_embedding_unquantised(
    form: str, kind: type[nn.Module], distance: float
) -> None:
    spec = test_t5.spec_of(test_t5.SMALL, precision="fp32")
    plain, packed = test_t5.initialised(spec), test_t5.initialised(spec)
    before = {name: layer.weight.shape for name, layer in list_matrices(plain).items() if isinstance(layer, nn.Linear)}
    put(packed, spec, **LORA, quantization=form)
    bases = {name: packed.get_submodule(f"{name}.base_layer") for name in before}
    assert {name for name, layer in bases.items() if not isinstance(layer, kind)} == {
        name for name in before if name.endswith(".wo")
    }
    assert not any(isinstance(module, kind) for module in (packed.lm_head, packed.shared))
    assert test_t5.loss_of(packed).item() == pytest.approx(test_t5.loss_of(plain).item(), rel=distance)


def test_t5_rounds_the_input_of_a_quantised_wo_to_bytes() -> None:
    """transformers' T5 converts activations to the dtype of the matrix `wo`, and an nf4 matrix is stored as bytes. So a
    quantised `wo` would give a wrong loss. This is the reason why our adapters leave `wo` unquantised."""
    quantised = test_t5.initialised(test_t5.spec_of(test_t5.SMALL, precision="fp32"))
    dtypes: list[torch.dtype] = []
    for name, layer in list_matrices(quantised).items():
        if name.endswith(".wo"):
            made = Linear4bit(layer.in_features, layer.out_features, bias=False, quant_type="nf4")
            made.load_state_dict(layer.state_dict())
            made.register_forward_pre_hook(lambda _, inputs: dtypes.append(inputs[0].dtype))
            owner, _, own = name.rpartition(".")
            setattr(quantised.get_submodule(owner), own, made.to("cpu"))
    test_t5.loss_of(quantised)
    assert dtypes and set(dtypes) == {torch.uint8}


def test_conv1d_matrices_of_transformers_gpt2_are_quantised() -> None:
    """transformers' GPT-2 has modules of class Conv1D in place of Linear, with transposed weights."""
    theirs, plain = test_gpt.theirs_of("gpt2"), test_gpt.theirs_of("gpt2")
    spec = test_gpt.spec_of(gpt.from_hugging_face(theirs.config.to_dict()).model_dump())
    put(theirs, spec, **NF4)
    assert sum(isinstance(module, Linear4bit) for module in theirs.modules()) == 4 * 3
    assert test_gpt.loss_of(theirs).item() == pytest.approx(test_gpt.loss_of(plain).item(), rel=0.05)


# ---------------------------------------------------------------------------------- frozen parts, refusals


def test_pattern_freezes_the_matching_parameters() -> None:
    spec = test_t5.spec_of(test_t5.SMALL, precision="fp32")
    module = put(test_t5.initialised(spec), spec, frozen=r"^encoder\.|layer_norm")
    frozen = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    assert frozen == {name for name, _ in module.named_parameters() if name[:8] == "encoder." or "layer_norm" in name}
    test_t5.loss_of(module).backward()


@pytest.mark.parametrize(("adapter", "message"), [
    (LORA | {"targets": ["q", "query"]}, "adapter.targets=query: the blocks of the model have no matrix of this name"),
    (LORA | {"targets": ["lm_head"]}, "adapter.targets=lm_head: the blocks of the model have no matrix of this name"),
    ({"frozen": "^encode$"}, "finds no parameter; names are, for example, shared.weight"),
    ({"frozen": ""}, None),
    ({"frozen": "weight"}, "finds every parameter, so nothing would be trained"),
])  # fmt: skip
def test_adapter_matching_no_parameter_or_freezing_all_is_refused(adapter: dict[str, Any], message: str | None) -> None:
    spec = test_t5.spec_of(test_t5.SMALL, precision="fp32")
    module = test_t5.initialised(spec)
    if message is None:
        assert all(parameter.requires_grad for parameter in put(module, spec, **adapter).parameters())
        return
    with pytest.raises(UserError) as refused:
        put(module, spec, **adapter)
    assert message in str(refused.value) and "\n" not in str(refused.value)
    assert all(parameter.requires_grad for parameter in module.parameters())


@pytest.mark.parametrize(("library", "adapter"), [("peft", LORA), ("bitsandbytes", NF4)])
def test_missing_adapter_library_is_refused_with_the_pip_extra(
    library: str, adapter: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    spec = test_t5.spec_of(test_t5.SMALL, precision="fp32")
    with pytest.raises(UserError, match=rf"{library} cannot be imported .*pip install 'zeroscale\[adapters\]'"):
        put(build_t5(spec, torch.device("meta")), spec, **adapter)


@pytest.mark.parametrize(("adapter", "message"), [
    ({"rank": 0}, "greater than 0"),
    ({"targets": ["q", "v"]}, r"adapter.targets=\[q, v\]: there are no adapters without adapter.rank"),
    ({"quantization": "nf4"}, "adapter.quantization=nf4: there are no adapters without adapter.rank"),
    (LORA | {"double_quantization": True}, "it needs nf4"),
    (LORA | {"frozen": "^encoder"}, "already freezes all weights except adapters"),
])  # fmt: skip
def test_contradictory_adapter_values_are_refused(adapter: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdapterSpec.model_validate(adapter)


def test_double_quantization_is_ignored_for_int8() -> None:
    assert AdapterSpec(**LORA, quantization="int8", double_quantization=True) == AdapterSpec(
        **LORA, quantization="int8"
    )
