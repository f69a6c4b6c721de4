"""AdamW on parameters that are divided among ranks: norm and clipping over all of them, the update on this rank's."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from bench.distributed.norm import sum_squares
from bench.engine_facts import SUMMED_STEPS
from bench.engines.fsdp.shards import SHARD
from bench.spec import OptimizerSpec

SMALLEST = 1e-6
"""What torch.nn.utils.clip_grads_with_norm_ adds to a norm before it divides by it."""


class ShardedUpdate:
    """Updates `parameters` from their gradients, which FSDP has reduced and divided as it divided them."""

    def __init__(self, parameters: Sequence[Parameter], optimizer: OptimizerSpec) -> None:
        self._parameters = list(parameters)
        self._clipping = optimizer.gradient_clipping
        fused = optimizer.implementation == "fused"
        on_gpu = self._parameters[0].device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            # on a GPU torch takes all tensors at once by itself, but not where they are DTensors
            foreach=True if on_gpu and not fused else None,
            fused=True if fused else None,
        )
        self.norm: Tensor | None = None  # of the last step, before clipping; 0-d
        self.steps = 0  # so far, over all attempts at a training

    def set_learning_rate(self, rate: float) -> None:
        """Update with another learning rate from now on."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def __call__(self) -> None:
        """Make one step."""
        gradients = [_local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        self.norm = self._add_over_ranks(torch.nn.utils.get_total_norm(gradients).square()).sqrt()
        summed = self._add_over_ranks(sum_squares(gradients)).sqrt() if self.steps < SUMMED_STEPS else self.norm
        if self._clipping > 0:
            factor = (self._clipping / (self.norm + SMALLEST)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.norm = summed
        self.steps += 1

    def _add_over_ranks(self, square: Tensor) -> Tensor:
        """Return the sum of all ranks' squares: one call, where DTensor's own norm takes one for every parameter."""
        mesh = _mesh(self._parameters[0])
        square = square.to(mesh.device_type)
        dist.all_reduce(square, group=mesh.get_group(SHARD))
        return square


def _mesh(parameter: Parameter) -> DeviceMesh:
    assert isinstance(parameter, DTensor)
    return parameter.device_mesh


def _local(gradient: Tensor) -> Tensor:
    assert isinstance(gradient, DTensor)
    return gradient.to_local()
