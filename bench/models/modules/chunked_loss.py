"""Head and cross-entropy together, some rows at a time, so that the logits of a large vocabulary never live at once.

Gradients are made beside the loss, while a chunk's logits are there (as Liger Kernel does it, arXiv 2410.10989), so
nothing is computed twice: three matmuls per row, as with the plain head. What stays from forward to backward is the
gradient of the head's matrix and of its input, in place of logits and log-probabilities.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

IGNORED = -100
"""The label that counts for nothing, in torch and transformers."""


class ChunkedHead(torch.nn.Module):
    """The head of a language model whose forward takes the labels and returns the mean loss of those that count."""

    def __init__(self, head: torch.nn.Linear, rows: int) -> None:
        """`rows` is how many tokens' logits live at once; the weight is that of `head`, partitioned or shared alike."""
        super().__init__()
        self.weight = head.weight
        self.rows = rows

    def forward(self, states: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss in fp32, 0-d, from states (…, width) and labels (…)."""
        loss: torch.Tensor = _ChunkedCrossEntropy.apply(states.flatten(0, -2), self.weight, labels.flatten(), self.rows)
        return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of `states` (n, width) times `weight` (vocabulary, width), for `labels` (n). Softmax and loss
    are computed in fp32; matmuls, and the sum of the weight's gradient over chunks, in the type of the states."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor, rows: int) -> torch.Tensor:
        counted = labels != IGNORED
        share = counted / counted.sum()
        targets = labels.clamp(min=0).unsqueeze(1)
        loss = torch.zeros((), dtype=torch.float32, device=states.device)
        of_states, of_weight = torch.empty_like(states), torch.empty_like(weight)
        for begin in range(0, len(states), rows):
            part = slice(begin, begin + rows)
            logits = torch.log_softmax(states[part] @ weight.t(), dim=1, dtype=torch.float32)
            loss -= logits.gather(1, targets[part]).squeeze(1) @ share[part]
            gradient = _compute_gradient(logits, targets[part], share[part]).to(states.dtype)
            del logits
            torch.mm(gradient, weight, out=of_states[part])
            if begin == 0:
                torch.mm(gradient.t(), states[part], out=of_weight)
            else:
                torch.addmm(of_weight, gradient.t(), states[part], out=of_weight)
            del gradient
        ctx.save_for_backward(of_states, of_weight)
        ctx.scaled = False
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        if ctx.scaled:
            raise RuntimeError("the gradients of a chunked loss were scaled in place: backward runs once")
        ctx.scaled = True
        of_states, of_weight = ctx.saved_tensors
        return of_states.mul_(upstream), of_weight.mul_(upstream), None, None


def _compute_gradient(log_probabilities: torch.Tensor, targets: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the loss by the logits, in the place of their log-probabilities."""
    probabilities = log_probabilities.exp_()
    minus_one = torch.full_like(targets, -1, dtype=probabilities.dtype)
    return probabilities.scatter_add_(1, targets, minus_one).mul_(share.unsqueeze(1))
