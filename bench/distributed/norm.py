"""The gradient norm by which a run is verified: squares summed in fp64, in the first steps only.

On a CPU torch 2.13 sums the squares of one large fp32 tensor with errors that grow with its size: the norm of 2^27
elements is 1.4 % too small. What clips gradients stays torch's own norm, in every step.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

_CHUNK = 2**16
"""Elements that are converted at a time: torch would make a copy of the whole tensor in fp64."""


def sum_squares(gradients: Iterable[Tensor]) -> Tensor:
    """Return the sum of all squares in fp64, 0-d, on the device of the gradients; on the host where there are none."""
    total = torch.zeros((), dtype=torch.float64)
    for gradient in gradients:
        total = total.to(gradient.device)
        for chunk in torch.split(gradient.detach().flatten(), _CHUNK):
            total += chunk.double().square_().sum()
    return total
