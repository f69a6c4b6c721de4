"""Tests of rehearsals with `--shapes-only`, in which large operations are skipped. They check the shapes of results of
skipped operations, and which operations are still executed."""

from collections.abc import Iterator

import pytest
import torch

from bench.core.spec import AdapterSpec
from bench.measure.failures import Refused
from bench.measure.shapes import SMALL, LeftOutOperations
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
