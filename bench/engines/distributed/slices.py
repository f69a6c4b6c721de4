"""Tensor parallelism by plain slices: every rank keeps some rows or columns of a matrix, and partial results are added
at the boundaries of such regions (arXiv 1909.08053). With sequence parallelism the tokens between regions are divided
as well (arXiv 2205.05198).

A region begins with `enter` and ends with `leave`: the matrices at its begin are sliced by rows of torch's weight, and
those at its end by columns, so that nothing is exchanged in between. In embedding and cross-entropy every
tensor-parallel rank has some tokens of the vocabulary (section 3); no rank has the logits of all tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Embedding, Module, Parameter
from torch.nn import functional as F

from bench.core.engine_facts import place
from bench.core.network import IGNORED
from bench.core.spec import RunSpec

TOKENS = 1
"""Dimension of states, (batch, length, width), that sequence parallelism divides."""


class TensorRanks(NamedTuple):
    """The ranks that share each matrix of a part of the model, and this rank's place among them."""

    group: dist.ProcessGroup
    ranks: int
    rank: int
    sequence: bool  # states outside the regions are divided by tokens

    def enter(self, states: Tensor) -> Tensor:
        """Return the states at the begin of a region: of all tokens."""
        exchanges = (_gather, _sum_scattered) if self.sequence else (_keep, _sum)
        return _Boundary.apply(states, self, *exchanges)  # type: ignore[no-any-return]

    def leave(self, partial: Tensor) -> Tensor:
        """Return the sum of all ranks' results of a region; with sequence parallelism, of this rank's tokens."""
        exchanges = (_sum_scattered, _gather) if self.sequence else (_sum, _keep)
        return _Boundary.apply(partial, self, *exchanges)  # type: ignore[no-any-return]

    def keep_own_tokens(self, tokens: Tensor) -> Tensor:
        """Return this rank's share of a tensor whose last dimension are tokens."""
        return tokens.chunk(self.ranks, -1)[self.rank] if self.sequence else tokens

    def count_all_tokens(self, states: Tensor) -> int:
        """Return the number of all tokens, of which these states may be a share."""
        return states.shape[TOKENS] * (self.ranks if self.sequence else 1)


def join_tensor_ranks(spec: RunSpec, rank: int) -> TensorRanks | None:
    """Return a rank's group; None if matrices are whole. Collective: every rank creates all groups, in one order."""
    ranks = spec.parallel.tensor
    if ranks == 1:
        return None
    groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, spec.world_size, ranks)]
    mine: Any = groups[rank // ranks]
    return TensorRanks(mine, ranks, place(spec, rank).tensor, spec.parallel.sequence)


Exchange = Callable[[Tensor, "TensorRanks"], Tensor]


class _Boundary(torch.autograd.Function):
    """Begin or end of a region: one exchange of the states, and another one of their gradient."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, among: TensorRanks, forwards: Exchange, backwards: Exchange) -> Tensor:
        ctx.among, ctx.backwards = among, backwards
        return forwards(states, among)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backwards(gradient, ctx.among), None, None, None


def _keep(tensor: Tensor, among: TensorRanks) -> Tensor:
    """Return the tensor, which every rank has."""
    return tensor.view_as(tensor)


def _sum(tensor: Tensor, among: TensorRanks) -> Tensor:
    """Return the sum over all ranks in a new tensor: autograd may use the given one as another gradient too."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=among.group)
    return total


def _gather(states: Tensor, among: TensorRanks) -> Tensor:
    """Return states (batch, length of all ranks, width) from (batch, length, width)."""
    first = states.transpose(0, TOKENS).contiguous()  # collectives divide the first dimension
    gathered = first.new_empty(among.ranks * first.shape[0], *first.shape[1:])
    dist.all_gather_into_tensor(gathered, first, group=among.group)
    return gathered.transpose(0, TOKENS).contiguous()


def _sum_scattered(partial: Tensor, among: TensorRanks) -> Tensor:
    """Return this rank's tokens, (batch, length / ranks, width), of the sum over all ranks."""
    first = partial.transpose(0, TOKENS).contiguous()
    own = first.new_empty(first.shape[0] // among.ranks, *first.shape[1:])
    dist.reduce_scatter_tensor(own, first, group=among.group)
    return own.transpose(0, TOKENS).contiguous()


class SummedLinear(Module):
    """The linear layer at the end of a region. Its weight is sliced by columns; its bias is whole, and added once."""

    bias: Parameter | None

    def __init__(self, linear: Any, among: TensorRanks) -> None:
        """`linear` has only this rank's columns."""
        super().__init__()
        self.weight, self.bias, self.among = linear.weight, linear.bias, among

    def forward(self, inputs: Tensor) -> Tensor:
        made = self.among.leave(F.linear(inputs, self.weight))
        return made if self.bias is None else made + self.bias


class Slice(NamedTuple):
    """A rank's part of a whole parameter."""

    dimension: int
    ranks: int
    rank: int

    def cut(self, whole: Tensor) -> Tensor:
        """Return the part, a view."""
        return whole.chunk(self.ranks, self.dimension)[self.rank]

    def size_of_whole(self, part: Tensor) -> list[int]:
        """Return the whole parameter's size."""
        size = list(part.shape)
        size[self.dimension] *= self.ranks
        return size


def cut_weights(module: Module, dimensions: Mapping[str, int], among: TensorRanks) -> None:
    """Keep this rank's slice of every weight whose owner, the last word of a module's name, is in `dimensions`.

    A bias is sliced where its weight is sliced by rows. Weights have no memory yet; each sliced dimension is a multiple
    of the ranks.
    """
    for name, owner in module.named_modules():
        if (dimension := dimensions.get(name.rpartition(".")[2])) is not None:
            for kind, parameter in list(owner.named_parameters(recurse=False)):
                if kind == "weight" or dimension == 0:
                    part = Slice(dimension, among.ranks, among.rank).cut(parameter.detach())
                    setattr(owner, kind, Parameter(torch.empty_like(part)))


def mark_slices(module: Module, dimensions: Mapping[str, int], among: TensorRanks) -> None:
    """Mark the parameters that `cut_weights` has sliced with their part of the whole."""
    for name, parameter in module.named_parameters():
        *_, owner, kind = name.split(".")
        if (dimension := dimensions.get(owner)) is not None and (kind == "weight" or dimension == 0):
            parameter.tensor_slice = Slice(dimension, among.ranks, among.rank)  # type: ignore[attr-defined]


def find_slice(parameter: Tensor) -> Slice | None:
    """Return the part of a whole that a parameter is; None: it is the whole."""
    return getattr(parameter, "tensor_slice", None)


@contextmanager
def make_whole(parameters: Sequence[Parameter]) -> Iterator[None]:
    """Context in which sliced parameters are whole, with undefined content; afterwards the slices get their part."""
    parts = [(parameter, part, parameter.data) for parameter in parameters if (part := find_slice(parameter))]
    for parameter, part, own in parts:
        parameter.data = own.new_empty(part.size_of_whole(own))
    try:
        yield
    finally:
        for parameter, part, own in parts:
            own.copy_(part.cut(parameter.data))
            parameter.data = own


class UnslicedGradients:
    """Gradients of parameters that every tensor-parallel rank has whole. With sequence parallelism each rank has
    computed them from its own tokens only."""

    def __init__(self, parameters: Sequence[Parameter], among: TensorRanks | None) -> None:
        summed = among is not None and among.sequence
        self._whole = [parameter for parameter in parameters if summed and find_slice(parameter) is None]
        self._among = among

    def reduce(self) -> None:
        """Add them over the ranks, in one collective."""
        gradients = [parameter.grad for parameter in self._whole if parameter.grad is not None]
        if not gradients or self._among is None:
            return
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self._among.group)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, total in zip(gradients, torch.split(flat, sizes), strict=True):
            gradient.copy_(total.view_as(gradient))


class SlicedEmbedding(Module):
    """Embedding of which each rank has the rows of some tokens."""

    def __init__(self, embedding: Embedding, among: TensorRanks) -> None:
        """`embedding` has only this rank's rows."""
        super().__init__()
        self.weight, self.among = embedding.weight, among

    def forward(self, tokens: Tensor) -> Tensor:
        own, here = _find_own(tokens, len(self.weight), self.among)
        return self.among.leave(F.embedding(own, self.weight) * here.unsqueeze(-1))


class OwnTokensEmbedding(Module):
    """A whole table, such as learned positions, in which this rank looks up only its own tokens."""

    def __init__(self, embedding: Embedding, among: TensorRanks) -> None:
        super().__init__()
        self.weight, self.among = embedding.weight, among

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(self.among.keep_own_tokens(tokens), self.weight)


def compute_sliced_loss(logits: Tensor, labels: Tensor, among: TensorRanks, reduction: str) -> Tensor:
    """Return torch's cross-entropy in fp32, 0-d and the same on all ranks.

    `logits` are (tokens, this rank's share of the vocabulary), `labels` (tokens,). `reduction` is mean, over the labels
    that count, or sum.
    """
    loss: Tensor = _SlicedCrossEntropy.apply(logits, labels, among, reduction)
    return loss


def _find_own(tokens: Tensor, rows: int, among: TensorRanks) -> tuple[Tensor, Tensor]:
    """Return the tokens as rows of this rank, and a mask of those that it has; other tokens get any existing row."""
    own = tokens - among.rank * rows
    return own.clamp(0, rows - 1), (own >= 0) & (own < rows)


class _SlicedCrossEntropy(torch.autograd.Function):
    """Cross-entropy with two exchanges for each token: the largest logit; sum of exponentials and chosen logit."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, among: TensorRanks, reduction: str) -> Tensor:
        wide = logits.float()
        largest = wide.amax(1)  # (tokens,): subtracted, so that no exponential overflows
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=among.group)
        wide = wide - largest.unsqueeze(1)
        own, here = _find_own(labels, wide.shape[1], among)
        chosen = wide.gather(1, own.unsqueeze(1)).squeeze(1) * here
        exponentials = wide.exp_()
        sums = torch.stack([exponentials.sum(1), chosen])  # (2, tokens), one collective for both
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
