"""An embedding and a cross-entropy of which every tensor-parallel rank has some tokens of the vocabulary
(arXiv 1909.08053, section 3): the logits of all of them are nowhere."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Embedding, Module
from torch.nn import functional as F

from bench.distributed.slices import TensorRanks
from bench.tokens import IGNORED


class SlicedEmbedding(Module):
    """The states of tokens, of which each rank knows those of its rows."""

    def __init__(self, embedding: Embedding, among: TensorRanks) -> None:
        """`embedding` has this rank's rows alone."""
        super().__init__()
        self.weight, self.among = embedding.weight, among

    def forward(self, tokens: Tensor) -> Tensor:
        own, here = _find_own(tokens, len(self.weight), self.among)
        return self.among.leave(F.embedding(own, self.weight) * here.unsqueeze(-1))


class OwnTokensEmbedding(Module):
    """A whole table, such as of learned positions, of which this rank looks up what its own tokens need."""

    def __init__(self, embedding: Embedding, among: TensorRanks) -> None:
        super().__init__()
        self.weight, self.among = embedding.weight, among

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(self.among.keep_own_tokens(tokens), self.weight)


def compute_sliced_loss(logits: Tensor, labels: Tensor, among: TensorRanks, reduction: str) -> Tensor:
    """Return torch's cross-entropy in fp32, 0-d and the same on all ranks, of logits (tokens, this rank's share of the
    vocabulary) for labels (tokens). `reduction` is mean, over the labels that count, or sum."""
    loss: Tensor = _SlicedCrossEntropy.apply(logits, labels, among, reduction)  # type: ignore[no-untyped-call]
    return loss


def _find_own(tokens: Tensor, rows: int, among: TensorRanks) -> tuple[Tensor, Tensor]:
    """Return the tokens as rows of this rank, and which of them it has; of others the row is one that exists."""
    own = tokens - among.rank * rows
    return own.clamp(0, rows - 1), (own >= 0) & (own < rows)


class _SlicedCrossEntropy(torch.autograd.Function):
    """Two exchanges of one number for each token: the largest logit, then sum of exponentials and chosen logit."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, among: TensorRanks, reduction: str) -> Tensor:
        wide = logits.float()
        largest = wide.amax(1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=among.group)
        wide = wide - largest.unsqueeze(1)
        own, here = _find_own(labels, wide.shape[1], among)
        chosen = wide.gather(1, own.unsqueeze(1)).squeeze(1) * here
        exponentials = wide.exp_()
        sums = torch.stack([exponentials.sum(1), chosen])
        dist.all_reduce(sums, group=among.group)
        counted = (labels != IGNORED).float()
        share = counted / counted.sum() if reduction == "mean" else counted
        probabilities = exponentials.div_(sums[0].unsqueeze(1))
        ctx.save_for_backward(probabilities, own, here, share)
        ctx.dtype = logits.dtype
        return ((sums[0].log() - sums[1]) * share).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None, None, None]:
        probabilities, own, here, share = ctx.saved_tensors
        gradient = probabilities.scatter_add(1, own.unsqueeze(1), -here.unsqueeze(1).to(probabilities.dtype))
        return gradient.mul_((share * upstream).unsqueeze(1)).to(ctx.dtype), None, None, None
