"""From the host to a rank's device: how a micro-batch gets there.

The copy beside the compute stream follows torch's notes on CUDA semantics, and was not tried on a GPU yet.
"""

from collections.abc import Mapping
from typing import Protocol

import torch


class BatchCopy(Protocol):
    """Brings micro-batches to a device."""

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors on the device, ready for what is launched next."""
        ...


class StreamCopy:
    """Copies on the stream that computes. From pageable memory the driver first takes a copy of its own, and may wait
    for the stream (CUDA driver API, "API synchronization behavior"): then the host cannot run ahead."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()}


class SideStreamCopy:
    """Copies from page-locked memory on a stream of its own, while the device computes what it was given before; only
    what is launched next waits for the copy. The allocator is told that the computing stream uses the tensors too,
    since it would else give their memory to the next copy while they are read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copied = {name: self._copy(tensor) for name, tensor in tensors.items()}
        computing.wait_stream(self._stream)  # the device does; the host goes on
        for tensor in copied.values():
            tensor.record_stream(computing)
        return copied

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on its way to the device. Its page-locked memory is not given away before it has left it: the
        allocator of such memory notes the copy."""
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self._device, non_blocking=True)


def create_batch_copy(device: torch.device, *, pinned: bool) -> BatchCopy:
    """Return the way to `device` of batches that the spec wants `pinned`, which on a CPU says nothing."""
    return SideStreamCopy(device) if device.type == "cuda" and pinned else StreamCopy(device)
