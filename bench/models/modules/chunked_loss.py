"""Head and cross-entropy computed together, a chunk of rows (tokens) at a time. So only the logits of one chunk are in
memory at any time, which saves much memory for a large vocabulary.

Forward also computes the gradients of each chunk while the chunk's logits exist, as Liger Kernel does (arXiv
2410.10989). Nothing is computed twice: there are three matmuls per row, as with a plain head. From forward to backward,
only the gradients of the head's matrix and of the head's input are kept, not logits or log-probabilities.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bench.core.network import IGNORED


class ChunkedHead(torch.nn.Module):
    """Head of a language model that takes labels and returns the mean loss over labels that are not ignored. Without
    labels it returns logits, as a plain head does."""

    def __init__(self, head: torch.nn.Linear, rows: int) -> None:
        """Arguments: `rows` is the number of tokens whose logits exist at once. The new head uses the weight parameter
        of `head` itself, even if this parameter is partitioned or shared."""
        super().__init__()
        self.weight = head.weight
        self.rows = rows

    def forward(self, states: Tensor, labels: Tensor | None = None) -> Tensor:
        """Return the loss, 0-d in fp32, from states (…, width) and labels (…). Without labels, return logits, (…,
        vocabulary)."""
        if labels is None:
            return torch.nn.functional.linear(states, self.weight)
        loss: Tensor = _ChunkedCrossEntropy.apply(states.flatten(0, -2), self.weight, labels.flatten(), self.rows)
        return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of the logits of `states` (n, width) and `weight` (vocabulary, width), for `labels` (n,), with
    the logits of `rows` tokens at a time. Softmax and loss are computed in fp32. Matmuls, and the sum of the weight's
    gradient over chunks, have the dtype of the states."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight: Tensor, labels: Tensor, rows: int) -> Tensor:
        counted = labels != IGNORED
        share = counted / counted.sum()
        targets = labels.clamp(min=0).unsqueeze(1)  # (n, 1); ignored labels get a valid index and weight 0
        loss = torch.zeros((), dtype=torch.float32, device=states.device)
        of_states = torch.empty_like(states)
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None  # a frozen head has no gradient
        for begin in range(0, len(states), rows):
            part = slice(begin, begin + rows)
            # (rows, vocabulary), the largest tensor here: everything below reuses its memory
            logits = torch.log_softmax(states[part] @ weight.t(), dim=1, dtype=torch.float32)
            loss -= logits.gather(1, targets[part]).squeeze(1) @ share[part]
            minus_one = torch.full_like(targets[part], -1, dtype=torch.float32)
            probabilities = logits.exp_().scatter_add_(1, targets[part], minus_one)
            gradient = probabilities.mul_(share[part].unsqueeze(1)).to(states.dtype)
            del logits, probabilities
            torch.mm(gradient, weight, out=of_states[part])
            if of_weight is None:
                pass
            elif begin == 0:
                torch.mm(gradient.t(), states[part], out=of_weight)
            else:
                torch.addmm(of_weight, gradient.t(), states[part], out=of_weight)
            del gradient
        ctx.save_for_backward(of_states, of_weight)
        ctx.scaled = False
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        if ctx.scaled:
            raise RuntimeError("the gradients of a chunked loss were scaled in place: backward runs once")
        ctx.scaled = True
        of_states, of_weight = ctx.saved_tensors
        weight_gradient = None if of_weight is None else of_weight.mul_(upstream)
        return of_states.mul_(upstream), weight_gradient, None, None
