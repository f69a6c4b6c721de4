"""Tensor parallelism with plain tensors. Every rank keeps one slice of each matrix: either some of the rows, or some of
the columns. A region is a group of layers, such as attention or feed-forward, in which each rank computes a partial
result. The partial results are summed at the end of the region (arXiv 1909.08053). Outside regions, sequence
parallelism divides the tokens among the ranks (arXiv 2205.05198).

A region begins with `enter` and ends with `leave`. Its first matrices are sliced by rows of torch's weight, and its
last matrix is sliced by columns, so the ranks exchange nothing within the region. Embedding and cross-entropy divide
the vocabulary among the tensor-parallel ranks (arXiv 1909.08053, section 3). No rank has the logits of the whole
vocabulary.
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
"""Dimension of states (activations, (batch, length, width)) that sequence parallelism divides: the tokens."""


class TensorRanks(NamedTuple):
    """Group of tensor-parallel ranks, and this rank's index in the group. Each rank of the group has its own slice of
    every matrix."""

    group: dist.ProcessGroup
    ranks: int
    rank: int
    sequence: bool  # True if states outside regions are divided by tokens (sequence parallelism)

    def enter(self, states: Tensor) -> Tensor:
        """Return the states of all tokens, as the layers of a region need them. With sequence parallelism, they are
        gathered from all ranks."""
        # backward is the adjoint of forward: reduce-scatter for a gather, all-reduce for the identity
        exchanges = (_gather, _sum_scattered) if self.sequence else (_keep, _sum)
        return _Boundary.apply(states, self, *exchanges)  # type: ignore[no-any-return]

    def leave(self, partial: Tensor) -> Tensor:
        """Return the sum over all ranks of their partial results at the end of a region. With sequence parallelism,
        return only the sum for this rank's tokens."""
        exchanges = (_sum_scattered, _gather) if self.sequence else (_sum, _keep)
        return _Boundary.apply(partial, self, *exchanges)  # type: ignore[no-any-return]

    def keep_own_tokens(self, tokens: Tensor) -> Tensor:
        """Return this rank's share of a tensor whose last dimension is the tokens. Without sequence parallelism this is
        the whole tensor."""
        return tokens.chunk(self.ranks, -1)[self.rank] if self.sequence else tokens

    def count_all_tokens(self, states: Tensor) -> int:
        """Return the number of tokens on all ranks together. With sequence parallelism, `states` has only this rank's
        tokens."""
        return states.shape[TOKENS] * (self.ranks if self.sequence else 1)


def join_tensor_ranks(spec: RunSpec, rank: int) -> TensorRanks | None:
    """Return the group of tensor-parallel ranks that contains `rank`. Return None without tensor parallelism.
    Collective: every rank creates all groups in the same order."""
    ranks = spec.parallel.tensor
    if ranks == 1:
        return None
    groups = [dist.new_group(list(range(first, first + ranks))) for first in range(0, spec.world_size, ranks)]
    mine: Any = groups[rank // ranks]
    return TensorRanks(mine, ranks, place(spec, rank).tensor, spec.parallel.sequence)


Exchange = Callable[[Tensor, "TensorRanks"], Tensor]


class _Boundary(torch.autograd.Function):
    """Autograd function at the start or end of a region of tensor-parallel layers. Its forward pass exchanges the
    states among the ranks with the function `forwards`. Its backward pass exchanges the gradient of the states with the
    function `backwards`."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, among: TensorRanks, forwards: Exchange, backwards: Exchange) -> Tensor:
        ctx.among, ctx.backwards = among, backwards
        return forwards(states, among)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.backwards(gradient, ctx.among), None, None, None


def _keep(tensor: Tensor, among: TensorRanks) -> Tensor:
    """Return the tensor without any exchange between ranks, because every rank already has the whole tensor."""
    return tensor.view_as(tensor)


def _sum(tensor: Tensor, among: TensorRanks) -> Tensor:
    """Return the sum of `tensor` over all ranks as a new tensor. `tensor` is not overwritten, because autograd may also
    use it as the gradient of another tensor."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=among.group)
    return total


def _gather(states: Tensor, among: TensorRanks) -> Tensor:
    """Return the states of all ranks' tokens, (batch, length of all ranks, width), from this rank's (batch, length,
    width)."""
    first = states.transpose(0, TOKENS).contiguous()  # collectives divide the first dimension
    gathered = first.new_empty(among.ranks * first.shape[0], *first.shape[1:])
    dist.all_gather_into_tensor(gathered, first, group=among.group)
    return gathered.transpose(0, TOKENS).contiguous()


def _sum_scattered(partial: Tensor, among: TensorRanks) -> Tensor:
    """Return the sum of `partial` over all ranks for this rank's tokens only, (batch, length / ranks, width)."""
    first = partial.transpose(0, TOKENS).contiguous()
    own = first.new_empty(first.shape[0] // among.ranks, *first.shape[1:])
    dist.reduce_scatter_tensor(own, first, group=among.group)
    return own.transpose(0, TOKENS).contiguous()


class SummedLinear(Module):
    """Last linear layer of a region of tensor-parallel layers. Its weight is sliced by columns, so its results are
    summed over the ranks. Its bias is whole, and is added once, after the sum."""

    bias: Parameter | None

    def __init__(self, linear: Any, among: TensorRanks) -> None:
        """`linear` must have only this rank's columns."""
        super().__init__()
        self.weight, self.bias, self.among = linear.weight, linear.bias, among

    def forward(self, inputs: Tensor) -> Tensor:
        made = self.among.leave(F.linear(inputs, self.weight))
        return made if self.bias is None else made + self.bias


class Slice(NamedTuple):
    """Position of a rank's slice within a whole parameter."""

    dimension: int
    ranks: int
    rank: int

    def cut(self, whole: Tensor) -> Tensor:
        """Return the rank's slice of `whole`, a view."""
        return whole.chunk(self.ranks, self.dimension)[self.rank]

    def size_of_whole(self, part: Tensor) -> list[int]:
        """Return the shape of the whole parameter to which the slice `part` belongs."""
        size = list(part.shape)
        size[self.dimension] *= self.ranks
        return size


def cut_weights(module: Module, dimensions: Mapping[str, int], among: TensorRanks) -> None:
    """Replace the weights of some modules by parameters with the shape of this rank's slice. `dimensions` maps the last
    component of a module's dotted name to the dimension that is sliced.

    A bias is sliced only if its weight is sliced by rows. Weights must still be on the meta device, and each sliced
    dimension must be a multiple of the number of ranks.
    """
    for name, owner in module.named_modules():
        if (dimension := dimensions.get(name.rpartition(".")[2])) is not None:
            for kind, parameter in list(owner.named_parameters(recurse=False)):
                # the bias of a weight sliced by columns stays whole: `SummedLinear` adds it once, after the sum
                if kind == "weight" or dimension == 0:
                    part = Slice(dimension, among.ranks, among.rank).cut(parameter.detach())
                    setattr(owner, kind, Parameter(torch.empty_like(part)))


def mark_slices(module: Module, dimensions: Mapping[str, int], among: TensorRanks) -> None:
    """Set the attribute `tensor_slice` of each parameter that `cut_weights` has sliced. The attribute is the position
    of the parameter's slice. `dimensions` maps names of modules to sliced dimensions, and must be the same as for
    `cut_weights`."""
    for name, parameter in module.named_parameters():
        *_, owner, kind = name.split(".")
        if (dimension := dimensions.get(owner)) is not None and (kind == "weight" or dimension == 0):
            parameter.tensor_slice = Slice(dimension, among.ranks, among.rank)  # type: ignore[attr-defined]


def find_slice(parameter: Tensor) -> Slice | None:
    """Return the position of a parameter's slice. Return None if the parameter is whole."""
    return getattr(parameter, "tensor_slice", None)


@contextmanager
def make_whole(parameters: Sequence[Parameter]) -> Iterator[None]:
    """Return a context in which sliced parameters are whole, with undefined content. When the context ends, each
    parameter keeps only this rank's slice of the content."""
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
    """Gradients of parameters that every tensor-parallel rank has whole. With sequence parallelism, each rank computes
    these gradients from its own tokens only, so they must be summed over the ranks."""

    def __init__(self, parameters: Sequence[Parameter], among: TensorRanks | None) -> None:
        summed = among is not None and among.sequence
        self._whole = [parameter for parameter in parameters if summed and find_slice(parameter) is None]
        self._among = among

    def reduce(self) -> None:
        """Sum the gradients over the tensor-parallel ranks in one collective; do nothing without sequence
        parallelism."""
        gradients = [parameter.grad for parameter in self._whole if parameter.grad is not None]
        if not gradients or self._among is None:
            return
        # one collective instead of one for each small parameter
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self._among.group)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, total in zip(gradients, torch.split(flat, sizes), strict=True):
            gradient.copy_(total.view_as(gradient))


class SlicedEmbedding(Module):
    """Embedding of which each rank has the rows of some tokens of the vocabulary."""

    def __init__(self, embedding: Embedding, among: TensorRanks) -> None:
        """`embedding` must have only this rank's rows."""
        super().__init__()
        self.weight, self.among = embedding.weight, among

    def forward(self, tokens: Tensor) -> Tensor:
        # (batch, length, width): zeros for tokens that other ranks hold, so that the sum over ranks is the embedding
        own, here = _find_own(tokens, len(self.weight), self.among)
        return self.among.leave(F.embedding(own, self.weight) * here.unsqueeze(-1))


class OwnTokensEmbedding(Module):
    """Embedding table that is whole on every rank, such as learned positions. With sequence parallelism, each rank
    looks up only its own tokens."""

    def __init__(self, embedding: Embedding, among: TensorRanks) -> None:
        super().__init__()
        self.weight, self.among = embedding.weight, among

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(self.among.keep_own_tokens(tokens), self.weight)


def compute_sliced_loss(logits: Tensor, labels: Tensor, among: TensorRanks, reduction: str) -> Tensor:
    """Return torch's cross-entropy in fp32, 0-d and equal on all ranks.

    `logits` are (tokens, this rank's share of the vocabulary), `labels` are (tokens,). `reduction` is "mean" or "sum",
    over the labels that are not ignored.
    """
    loss: Tensor = _SlicedCrossEntropy.apply(logits, labels, among, reduction)
    return loss


def _find_own(tokens: Tensor, rows: int, among: TensorRanks) -> tuple[Tensor, Tensor]:
    """Return two tensors with the shape of `tokens`. The first tensor has the row of each token within this rank's
    slice of the vocabulary. The second tensor is True for the tokens that are in this slice. All other tokens get an
    arbitrary valid row."""
    own = tokens - among.rank * rows
    return own.clamp(0, rows - 1), (own >= 0) & (own < rows)


class _SlicedCrossEntropy(torch.autograd.Function):
    """Cross-entropy over a vocabulary that is divided among ranks, with two all-reduces. The first all-reduce finds the
    largest logit of each token. The second all-reduce computes two sums over the ranks for each token: the exponentials
    of all logits, and the logit of the label (zero on ranks without this label)."""

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
        # (tokens,): factor of each token's loss
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
        # (tokens, share of the vocabulary): softmax minus one at the label, on the rank that has it
        gradient = probabilities.scatter_add(1, own.unsqueeze(1), -here.unsqueeze(1).to(probabilities.dtype))
        return gradient.mul_((share * upstream).unsqueeze(1)).to(ctx.dtype), None, None, None
