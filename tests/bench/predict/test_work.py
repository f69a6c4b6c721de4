"""Tests of the work (FLOPs and bytes) of a forward or backward pass. FLOPs are compared with a closed form for T5,
which test_t5.py compares with torch's FlopCounterMode."""

from collections.abc import Callable

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch.utils.checkpoint import checkpoint

from bench.config import compose
from bench.core.spec import RunSpec
from bench.models.t5 import Shape
from bench.predict.work import (
    Matmul,
    PassWork,
    compute_backward,
    compute_flops_per_step,
    compute_forward,
    compute_recomputed,
    compute_recomputed_flops,
)
from bench.predict.workload import build_workload, get_network

MODELS = ["tiny", "mt5_small", "mt5_xxl", "t5_3b", "t5_v1_1_xl"]


def spec(*overrides: str) -> RunSpec:
    return compose.compose_request(compose.parse_single(["batch.micro=3", "devices_per_node=2", *overrides]), None).spec


def flops(work: PassWork) -> int:
    return work.matmul_flops + work.attention_flops


def closed_form(shape: Shape, encoder: int, decoder: int) -> tuple[int, int]:
    """Return the forward FLOPs of a T5 for one sample: those of all blocks, and those of the head. `encoder` and
    `decoder` are numbers of tokens."""
    projection = 2 * shape.d_model * shape.d_inner  # per token; query, key, value and output each have one projection
    feed_forward = 2 * (3 if shape.gated else 2) * shape.d_model * shape.d_ff  # per token
    pair = 2 * 2 * shape.d_inner  # per query and key: the score, the weighted value
    encoder_block = encoder * (4 * projection + feed_forward) + encoder * encoder * pair
    self_attention = decoder * 4 * projection + decoder * decoder * pair
    cross_attention = (2 * decoder + 2 * encoder) * projection + decoder * encoder * pair
    decoder_block = self_attention + cross_attention + decoder * feed_forward
    blocks = shape.encoder_layers * encoder_block + shape.decoder_layers * decoder_block
    return blocks, 2 * decoder * shape.d_model * shape.vocab


@pytest.mark.parametrize("model", MODELS)
def test_flops_of_forward_and_backward_equal_the_closed_form(model: str) -> None:
    asked = spec(f"model={model}")
    there = compute_forward(get_network(asked), build_workload(asked, "cuda"))
    blocks_and_head = closed_form(Shape.model_validate(asked.model.shape), 512, 128)
    assert flops(there) + flops(compute_backward(there)) == 3 * 3 * sum(blocks_and_head)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_recomputation_has_the_flops_of_the_blocks_without_the_last_matrix(
    dropout: float,
) -> None:
    asked = spec("model=mt5_base", "activation_checkpointing=true", f"model.dropout={dropout}")
    network, shape = get_network(asked), Shape.model_validate(asked.model.shape)
    blocks, _ = closed_form(shape, 512, 128)
    last = 2 * 12 * (512 + 128) * shape.d_ff * shape.d_model
    one = blocks if dropout else blocks - last
    assert flops(compute_recomputed(network, build_workload(asked, "cuda"))) == 3 * one
    assert compute_recomputed_flops(network, asked.sequence, dropout=dropout) == one


class TwoProducts(torch.nn.Module):
    """A block of two weight matrices. It is a class of its own, because torch does not compile a block that is only a
    built-in module such as `torch.nn.Linear`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.last(self.first(rows).relu())
        return output


def test_compiled_block_is_recomputed_completely() -> None:
    """A compiled block with two weight matrices runs with activation checkpointing. Its compiled graphs must run two
    matrix products in forward, and both again in the recomputation. The prediction must count this full
    recomputation."""
    ran: list[int] = []

    def compile_forward(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        products = sum("mm" in str(node.target) for node in graph.graph.nodes)

        def run(*given: object) -> object:
            ran.append(products)
            return graph.forward(*given)

        return make_boxed_func(run)

    block = TwoProducts()
    backend = aot_autograd(fw_compiler=compile_forward, bw_compiler=lambda graph, _: make_boxed_func(graph.forward))
    block.compile(backend=backend)
    checkpoint(block, torch.ones(4, 8, requires_grad=True), use_reentrant=False).sum().backward()
    assert ran == [2, 2]
    asked = spec("model=mt5_base", "activation_checkpointing=true", "model.compile=blocks")
    blocks, _ = closed_form(Shape.model_validate(asked.model.shape), 512, 128)
    assert flops(compute_recomputed(get_network(asked), build_workload(asked, "cuda"))) == 3 * blocks
    found = compute_flops_per_step(asked)
    assert (found.hardware - found.model) == asked.global_batch * blocks


def test_recomputation_without_checkpointing_is_empty() -> None:
    asked = spec("model=mt5_base")
    assert compute_recomputed(get_network(asked), build_workload(asked, "cuda")) == PassWork()


def test_backward_of_a_matrix_product_is_two_products_of_equal_flops() -> None:
    there = PassWork((Matmul(8, 4, 2, 3),), 10, 100, 5)
    back = compute_backward(there)
    assert back.matmuls == (Matmul(8, 2, 4, 3, kind="inputs"), Matmul(4, 8, 2, 3, kind="weights"))
    assert (back.matmul_flops, back.attention_flops) == (2 * there.matmul_flops, 20)


def test_fused_attention_skips_causally_masked_scores_and_recomputes_the_others() -> None:
    asked = spec("model=gpt2", "objective=causal_lm")
    there = compute_forward(get_network(asked), build_workload(asked, "cuda"))
    assert there.fused_flops * 2 == there.attention_flops
    assert compute_backward(there).fused_flops * 2 == 5 * there.fused_flops
    biased = spec("model=mt5_small")  # a bias is added to every pair
    found = compute_forward(get_network(biased), build_workload(biased, "cuda"))
    assert found.fused_flops == found.attention_flops


def test_compiled_blocks_have_less_traffic_and_fewer_kernel_launches() -> None:
    plain, compiled = (
        compute_forward(get_network(asked), build_workload(asked, "cuda"))
        for asked in (spec("model=mt5_base"), spec("model=mt5_base", "model.compile=blocks"))
    )
    assert compiled.traffic_bytes < 0.6 * plain.traffic_bytes and compiled.operations < 0.6 * plain.operations
    assert compiled.matmuls == plain.matmuls


def test_dropout_adds_the_traffic_of_its_mask() -> None:
    plain, dropped = (
        compute_forward(get_network(asked), build_workload(asked, "cuda"))
        for asked in (spec("model=mt5_base"), spec("model=mt5_base", "model.dropout=0.1"))
    )
    rows = 3 * (12 * 2 * 512 + 12 * 3 * 128)  # sub-layers of encoder and decoder
    inner = 3 * 12 * (512 + 128) * 2048
    assert dropped.traffic_bytes - plain.traffic_bytes == 5 * (rows * 768 + inner)
