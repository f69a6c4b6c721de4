"""Tests of rehearsals with `--shapes-only`, in which large operations are skipped. They check the shapes of results of
skipped operations, and which operations are still executed."""

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from bench.core.engine_costs import CUBLAS_BYTES
from bench.core.spec import AdapterSpec
from bench.measure.failures import Refused
from bench.measure.shapes import SMALL, LeftOutOperations, leave_out
from bench.models.modules.adapters import _pack

pytestmark = pytest.mark.usefixtures("left_out")


@pytest.fixture
def left_out() -> Iterator[None]:
    with LeftOutOperations():
        yield


def test_large_product_has_its_shape_without_being_computed() -> None:
    made = torch.ones(100_000, 1000) @ torch.ones(1000, 10)
    assert (made.shape, made.dtype, made.device.type) == ((100_000, 10), torch.float32, "cpu")
    assert float(made.sum()) == 0.0  # a small result computed from a skipped operation is zero


def test_large_tensor_uses_no_memory_before_a_write() -> None:
    """The test creates 1024 tensors of 1 GiB. Their total of 1 TiB exceeds the host's memory."""
    parts = [torch.zeros(2**28).add_(1.0) for _ in range(1024)]
    assert sum(part.nbytes for part in parts) == 2**40


def test_small_operations_are_computed() -> None:
    assert torch.arange(SMALL // 2).float().sum().item() == (SMALL // 2) * (SMALL // 2 - 1) / 2


def test_views_share_memory_and_in_place_operations_keep_the_tensor() -> None:
    whole = torch.zeros(2 * SMALL)
    assert whole[SMALL:].view(-1, 2).untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert whole.add_(1.0) is whole
    assert whole.double().dtype == torch.float64


def test_gradients_have_the_shapes_of_their_tensors() -> None:
    layer = torch.nn.Linear(200, 300, dtype=torch.bfloat16)
    torch.nn.functional.cross_entropy(layer(torch.ones(64, 200, dtype=torch.bfloat16)), torch.arange(64)).backward()
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    assert (layer.weight.grad.shape, layer.bias.grad.shape) == ((300, 200), (300,))


@pytest.mark.parametrize("form", ["nf4", "int8"])
def test_quantised_matrix_has_its_size_without_being_computed(form: str) -> None:
    packed = _pack(torch.nn.Linear(256, 128), AdapterSpec(rank=4, quantization=form))
    assert packed.weight.data.view(torch.uint8).numel() == 256 * 128 // (2 if form == "nf4" else 1)
    inputs = torch.ones(64, 256, requires_grad=True)
    packed(inputs).sum().backward()
    assert inputs.grad is not None and inputs.grad.shape == (64, 256)


def test_tensors_without_memory_stay_without_memory() -> None:
    assert torch.empty(2 * SMALL, device="meta").add(1.0).device.type == "meta"


def test_shape_that_depends_on_values_is_refused() -> None:
    with pytest.raises(Refused, match=r"nonzero.default: the shape of its result depends on values"):
        torch.zeros(2 * SMALL).nonzero()


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("groups", [1, 4])
def test_attention_for_a_gpu_keeps_no_scores(dtype: torch.dtype, groups: int, masked: bool) -> None:
    """Saved for backward are queries, keys, values and output, which are allocated before or returned, and a number in
    fp32 for each query. On a CPU, a mask with a gradient would make torch save scores of 2 x 8 x 256 x 256."""
    query = torch.ones(2, 8, 256, 64, dtype=dtype, requires_grad=True)
    key, value = (torch.ones(2, 8 // groups, 256, 64, dtype=dtype, requires_grad=True) for _ in range(2))
    bias = torch.zeros(1, 8, 256, 256, dtype=dtype, requires_grad=True) if masked else None
    saved: dict[int, torch.Tensor] = {}
    keep = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.setdefault(tensor.untyped_storage().data_ptr(), tensor), lambda kept: kept
    )
    with leave_out(imitates_gpu=True), keep:
        made = functional.scaled_dot_product_attention(query, key, value, bias, enable_gqa=groups > 1)
        of_scores = [tensor for tensor in saved.values() if tensor.shape[-2:] == (256, 256)]
        assert all(tensor.shape[0] == 1 or tensor.stride(0) == 0 for tensor in of_scores)  # the bias itself
        made.sum().backward()
    assert made.shape == query.shape
    for one in (query, key, value, *([] if bias is None else [bias])):
        assert one.grad is not None and one.grad.shape == one.shape


def test_optimizer_for_a_gpu_updates_all_parameters_together() -> None:
    made = torch.nn.Linear(200, 300)
    optimizer = torch.optim.AdamW(made.parameters())
    with leave_out(imitates_gpu=True):
        made(torch.ones(64, 200)).sum().backward()
        optimizer.step()
    assert optimizer.param_groups[0]["foreach"]


MIB = 2**20
IMITATED = """
import sys, torch
from bench.measure import memory
CPU, live, seen = torch.device("cpu"), {}, []
memory.install_counter(CPU, imitates_gpu=True)
for step in sys.argv[1:]:
    name, _, size = step.partition("=")
    if size:
        live[name] = torch.empty(int(size), dtype=torch.uint8)
    else:
        del live[name]
peaks = memory.read_peaks(CPU)
print(memory.read_live_bytes(CPU), *peaks, memory.find_least_reserved_bytes(CPU))
"""
"""Program that imitates a GPU's allocator. Its arguments are requests (`name=bytes`) and releases (`name`)."""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("steps", "live", "reserved", "least"),
    [
        # at least 512 bytes, from a segment of 2 MiB
        ({"a": 100}, 512, 2 * MIB, 2 * MIB),
        # from a segment of 20 MiB, whose rest serves the second request
        ({"a": 3 * MIB, "b": 15 * MIB}, 18 * MIB, 20 * MIB, 20 * MIB),
        # a segment of its own, in multiples of 2 MiB; a rest above 1 MiB is a block of its own, a smaller rest is not
        ({"a": 30 * MIB + 1}, 30 * MIB + 512, 32 * MIB, 32 * MIB),
        ({"a": 11 * MIB + MIB // 2}, 12 * MIB, 12 * MIB, 12 * MIB),
        # the free segment is too small for the second request; a full GPU would give it back
        ({"a": 100 * MIB, "-a": 0, "b": 150 * MIB}, 150 * MIB, 250 * MIB, 150 * MIB),
        # a segment that is in use in part cannot be given back
        ({"a": 100 * MIB, "-a": 0, "b": 30 * MIB, "c": 150 * MIB}, 180 * MIB, 250 * MIB, 250 * MIB),
        # neighbours that are free are merged
        ({"a": 40 * MIB, "-a": 0, "b": 20 * MIB, "c": 20 * MIB, "-b": 0, "-c": 0, "d": 40 * MIB},
         40 * MIB, 40 * MIB, 40 * MIB),
    ],
)  # fmt: skip
def test_imitated_allocator_reserves_the_segments_of_cuda(
    left_out: None, steps: dict[str, int], live: int, reserved: int, least: int
) -> None:
    """The expected bytes are calculated by hand from the rules in torch's CUDACachingAllocator.cpp."""
    words = [f"{name}={size}" if size else name.removeprefix("-") for name, size in steps.items()]
    done = subprocess.run([sys.executable, "-c", IMITATED, *words], capture_output=True, text=True, check=True)
    counted = [int(word) - CUBLAS_BYTES for word in done.stdout.split()]
    assert counted[0] == live
    assert counted[2] == reserved
    assert counted[3] == pytest.approx(least, abs=0.001 * (least + CUBLAS_BYTES))
