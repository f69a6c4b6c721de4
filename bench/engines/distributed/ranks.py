"""Functions that several engines call on each rank: weights of micro-batches, evaluation, and saving of the random
state.

With the option loss_mean=tokens, the loss of a step is the mean over all its target tokens. This mean does not depend
on how samples are divided into micro-batches and ranks. With loss_mean=micro_batches, the loss is the mean over the
losses of the micro-batches. It depends on the division if samples have different numbers of target tokens.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from bench import objectives
from bench.core.network import IGNORED, PAD, TokenKind
from bench.core.spec import RunSpec


def evaluate(module: Module, batches: Iterable[dict[str, Tensor]]) -> Tensor:
    """Return the mean loss of `batches` in evaluation mode, 0-d in fp32. Leave the module in training mode."""
    module.eval()
    with torch.no_grad():
        losses = [module(**batch).loss.float() for batch in batches]
    module.train()
    return torch.stack(losses).mean()


def predict_tokens(module: Any, tensors: dict[str, Tensor]) -> Tensor:
    """Return the most likely next token at each position, (batch, length), in evaluation mode. Leave the module in
    training mode. `bench.engines.OptionalMembers` documents `tensors`."""
    inputs = dict(tensors)
    if (labels := inputs.pop("labels", None)) is not None:
        inputs["decoder_input_ids"] = module.prepare_decoder_input_ids_from_labels(labels)
    module.eval()
    with torch.no_grad():
        logits: Tensor = module(**inputs).logits
    module.train()
    return logits.argmax(-1)


class WeightedBatch(NamedTuple):
    """A micro-batch, and the factor by which its mean loss is multiplied. None means 1."""

    tensors: dict[str, Tensor]
    weight: Tensor | None  # 0-d

    def weigh(self, loss: Tensor) -> Tensor:
        """Return `loss`, the mean loss of this micro-batch, multiplied by the micro-batch's `weight`."""
        return loss if self.weight is None else loss * self.weight


def weigh(micro_batches: Iterable[dict[str, Tensor]], spec: RunSpec) -> Iterator[WeightedBatch]:
    """Yield the micro-batches of a step with their weights. The mean of the weights over micro-batches and ranks is 1.
    Collective.

    Weights differ from 1 only if two conditions hold: the loss is the mean over target tokens, and the number of target
    tokens varies among samples (`objectives.weighs_targets`). In this case, the number of target tokens in the whole
    step is needed before the first backward. All micro-batches are therefore loaded at once, and their numbers of
    target tokens are summed over the ranks. In all other runs, each micro-batch is loaded when it is needed.

    A micro-batch without any target token has weight 0. However, its mean loss would be 0 / 0 = NaN, and NaN × 0 is
    still NaN. One of its tokens is therefore made a target token, which does not affect the weighted loss. If a whole
    step has no target token, its loss is NaN.
    """
    if not objectives.weighs_targets(spec):
        yield from (WeightedBatch(batch, None) for batch in micro_batches)
        return
    batches, kinds = list(micro_batches), objectives.load(spec.objective).KINDS
    counts = torch.stack([count_targets(kinds, batch) for batch in batches]).double()  # (micro-batches,)
    total = counts.sum()
    dist.all_reduce(total)  # the sum includes ranks that share a copy of the model and have the same samples
    weights = (counts * (len(batches) * dist.get_world_size()) / total).float()
    for batch, count, weight in zip(batches, counts, weights.unbind(), strict=True):
        labels = batch["labels"].clone()  # (batch, length)
        # the last label counts if no other label does; torch.where does not wait for the device
        labels[0, -1] = torch.where(count > 0, labels[0, -1], PAD)
        yield WeightedBatch(batch | {"labels": labels}, weight)


def count_targets(kinds: Sequence[TokenKind], tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the number of tokens in a micro-batch that have a loss, 0-d. If the labels are also the inputs, the model
    shifts the labels by one, and the first token of each row has no loss."""
    found = [
        (tensors["labels"][:, int("input_ids" in kind.arguments) :] != IGNORED).sum()
        for kind in kinds
        if "labels" in kind.arguments
    ]
    return torch.stack(found).sum()


def save_random_state(folder: Path) -> None:
    """Write this rank's random state to its own file in a checkpoint folder."""
    on_gpu = {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    torch.save({"cpu": torch.get_rng_state(), **on_gpu}, _find_own(folder))


def load_random_state(folder: Path) -> None:
    """Restore this rank's random state from the file that `save_random_state` wrote."""
    state = torch.load(_find_own(folder))
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])


def _find_own(folder: Path) -> Path:
    return folder / f"random_state_{dist.get_rank()}.pt"
