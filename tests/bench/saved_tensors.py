"""Helper that measures the tensors which autograd saves in a forward pass. Tests compare their bytes with the predicted
activation memory."""

from collections.abc import Callable

import torch


def kept_by_autograd(module: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> int:
    """Run a forward pass with `loss()`, and return the number of bytes that autograd saves for the backward pass. A
    storage that several tensors share counts once. The parameters of `module` do not count."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage.data_ptr()] = storage  # keeps the storage alive, so that its address is not reused
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert loss().requires_grad
    return sum(storage.nbytes() for storage in storages.values())
