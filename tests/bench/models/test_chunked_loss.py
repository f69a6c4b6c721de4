"""Tests of the chunked loss, which computes logits for a few tokens at a time. It must have the loss, gradients and
FLOPs of the plain loss, with far less memory."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from test_t5 import SMALL, counted_flops, initialised, spec_of
from torch.nn import functional

from bench.core.network import IGNORED
from bench.core.spec import canonical, config_id
from bench.measure import memory
from bench.models import t5
from bench.models.modules.chunked_loss import ChunkedHead
from bench.models.t5.build import build
from bench.predict.work import compute_training_flops

CPU = torch.device("cpu")


def head_of(vocabulary: int, width: int, rows: int) -> tuple[torch.nn.Linear, ChunkedHead]:
    head = torch.nn.Linear(width, vocabulary, bias=False)
    return head, ChunkedHead(head, rows)


def gradients(loss: torch.Tensor, *of: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(3 * loss, of))  # scaled, because engines scale every loss


@pytest.mark.parametrize("rows", [1, 5, 12, 100], ids="{} rows".format)
def test_chunked_loss_and_gradients_equal_torchs_with_ignored_labels(rows: int) -> None:
    torch.manual_seed(0)
    head, chunked = head_of(vocabulary=50, width=8, rows=rows)
    states, labels = torch.randn(3, 4, 8, requires_grad=True), torch.randint(50, (3, 4))
    labels[1, 2:] = IGNORED
    plain = functional.cross_entropy(head(states).flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
    loss = chunked(states, labels)
    torch.testing.assert_close(loss, plain)
    for ours, theirs in zip(gradients(loss, states, head.weight), gradients(plain, states, head.weight), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_error_of_the_chunked_loss_in_bf16_is_no_larger_than_torchs() -> None:
    torch.manual_seed(0)
    states, labels = torch.randn(64, 32), torch.randint(1000, (64,))
    weight = torch.randn(1000, 32) / 4

    def made(dtype: torch.dtype, rows: int | None) -> list[torch.Tensor]:
        head, chunked = head_of(1000, 32, rows or 64)
        head.weight.data = weight.to(dtype)
        inputs = states.to(dtype).requires_grad_()
        loss = chunked(inputs, labels) if rows else functional.cross_entropy(head(inputs), labels)
        return [loss.float(), *(gradient.float() for gradient in gradients(loss, inputs, head.weight))]

    truth, plain, chunked = made(torch.float32, None), made(torch.bfloat16, None), made(torch.bfloat16, 16)
    for exact, theirs, ours in zip(truth, plain, chunked, strict=True):
        assert (ours - exact).norm() <= 1.2 * (theirs - exact).norm() + 1e-3 * exact.norm()


def test_second_backward_of_a_chunked_loss_is_refused() -> None:
    _, chunked = head_of(10, 4, 2)
    loss = chunked(torch.randn(3, 4, requires_grad=True), torch.tensor([1, 2, 3]))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="backward runs once"):
        loss.backward()


@pytest.mark.parametrize("separate_head", [True, False], ids=["own head", "tied head"])
def test_t5_has_the_same_gradients_with_a_chunked_loss(separate_head: bool) -> None:
    shape = SMALL | {"separate_head": separate_head}
    plain, chunked = (initialised(spec_of(shape, {"loss_chunk_tokens": rows})) for rows in (None, 3))
    tokens = torch.arange(24).reshape(2, 12) % 96
    mask, labels = torch.ones_like(tokens), tokens[:, :7].clone()
    mask[0, 9:], labels[1, 5:] = 0, IGNORED
    losses = [module(input_ids=tokens, attention_mask=mask, labels=labels).loss for module in (plain, chunked)]
    torch.testing.assert_close(losses[1], losses[0])
    sum(losses).backward()
    grown = dict(chunked.named_parameters())
    assert grown.keys() == dict(plain.named_parameters()).keys()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(grown[name].grad, parameter.grad, msg=name)


def test_chunked_loss_adds_no_flops() -> None:
    module = build(spec_of(SMALL, {"loss_chunk_tokens": 2}), torch.device("meta"))
    assert counted_flops(module, 12, 7) == compute_training_flops(
        t5.stacks(t5.Shape.model_validate(SMALL)), {"encoder": 12, "decoder": 7}
    )


def test_chunked_loss_never_holds_all_logits_in_memory() -> None:
    """In fp32, the logits of all 4,096 tokens with a vocabulary of 8,192 take 134 MB. The logits of a chunk of 256
    tokens take 8 MB."""
    memory.install_counter(CPU)
    if memory.read_live_bytes(CPU) is None:
        pytest.skip("no C++ compiler")
    rows, vocabulary, width = 4096, 8192, 16
    logits, labels = 4 * rows * vocabulary, torch.randint(vocabulary, (rows,))
    states = torch.randn(rows, width, requires_grad=True)
    head, chunked = head_of(vocabulary, width, 256)

    def peak(loss: Any) -> int:
        before = memory.read_live_bytes(CPU)
        memory.reset_peak(CPU)
        loss().backward()
        peak = memory.read_peak_bytes(CPU)
        head.weight.grad = states.grad = None
        assert peak is not None and before is not None
        return peak - before

    plain = peak(lambda: functional.cross_entropy(head(states), labels))
    assert plain >= 2 * logits, "logits, and what cross-entropy keeps of them"
    small = 4 * (rows + vocabulary) * width  # bytes of the gradients
    assert peak(lambda: chunked(states, labels)) <= 3 * logits / 16 + 2 * small


def test_chunked_loss_changes_the_config_id_and_specs_without_it_omit_the_field() -> None:
    plain, chunked = spec_of(SMALL), spec_of(SMALL, {"loss_chunk_tokens": 512})
    assert "loss_chunk_tokens" not in canonical(plain)
    assert config_id(plain) != config_id(chunked)
    with pytest.raises(ValidationError, match=r"loss_chunk_tokens=512 with precision=fp16: .*; set precision=bf16"):
        spec_of(SMALL, {"loss_chunk_tokens": 512}, precision="fp16")


def test_compiled_blocks_have_the_same_losses_gradients_and_parameter_names(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_module = torch.nn.Module.compile  # torch's default backend would take a minute here
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compile_module(self, backend="eager"))
    shape = SMALL | {"encoder_layers": 1, "decoder_layers": 1}
    plain, compiled = (initialised(spec_of(shape, {"compile": way})) for way in ("none", "blocks"))
    tokens = torch.arange(24).reshape(2, 12) % 96
    losses = [module(input_ids=tokens, labels=tokens[:, :7].contiguous()).loss for module in (plain, compiled)]
    sum(losses).backward()
    torch.testing.assert_close(losses[1], losses[0])
    grown = dict(compiled.named_parameters())
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(grown[name].grad, parameter.grad, msg=name)
    blocks = [*compiled.encoder.block, *compiled.decoder.block]
    assert all(block._compiled_call_impl is not None for block in blocks)
