"""Answers of the model to held-out prompts during a training, and their quality.

Decoding is greedy: each token is the most likely token. For each token there is a forward pass over the whole sequence,
without a cache of keys and values. This works with every engine, including engines that partition the weights. Every
rank makes the same number of passes, because such engines communicate in a pass.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from bench.core import quality
from bench.core.network import PAD
from bench.data import PromptBatch, Prompts
from bench.engines import OptionalMembers
from bench.measure.loop import BatchCopy
from bench.measure.peers import Peers


class Answer(NamedTuple):
    """Answer to a held-out prompt."""

    number: int  # of the sample
    prediction: str
    reference: str


def generate(engine: OptionalMembers, tensors: dict[str, Tensor], ends: Tensor | None, limit: int) -> Tensor:
    """Return the tokens of the model's answers to a batch of prompts, with shape (micro, limit). Tokens after EOS have
    no meaning. `tensors` has the prompts.

    `limit` is the maximum number of tokens of an answer. `ends` has the number of tokens of each prompt, and the answer
    continues the prompt. If `ends` is None, `tensors` are the inputs of an encoder, and the decoder writes the answer.
    If the sequence has no room for `limit` tokens, the last tokens of the answer are PAD.
    """
    inputs = next(iter(tensors.values()))
    answers = inputs.new_full((len(inputs), limit), PAD)
    if ends is None:
        for place in range(limit):
            answers[:, place] = engine.predict_tokens({**tensors, "labels": answers})[:, place]
        return answers
    [name], width, ids = tensors, inputs.shape[1], inputs.clone()
    for place in range(limit):
        at = (ends + place).unsqueeze(1)  # (micro, 1): position of the next token
        inside = at < width
        found = engine.predict_tokens({name: ids}).gather(1, (at - 1).clamp(max=width - 1))
        answers[:, place] = found.where(inside, PAD).squeeze(1)
        ids = ids.scatter(1, at.clamp(max=width - 1), found.where(inside, ids[:, -1:]))
    return answers


def answer(
    engine: OptionalMembers, prompts: Prompts, copy: BatchCopy, before_batch: Callable[[], None]
) -> list[Answer]:
    """Return the model's answers to all prompts of this rank. `before_batch` is called before each batch of prompts.
    All ranks must call this."""
    answers = list[Answer]()
    for batch in prompts.batches:
        before_batch()
        tokens = generate(engine, *_place(batch, copy), prompts.limit)
        texts = [prompts.decode(_cut(row, prompts.eos)) for row in tokens.tolist()]
        answers += map(Answer, batch.numbers, texts, batch.references)
    return answers


def measure(names: Sequence[str], own: list[Answer], peers: Peers) -> dict[str, float] | None:
    """Return the value of each quality measure in `names` over the answers of all ranks. `own` are this rank's answers.
    Return None on every rank except the main rank. All ranks must call this."""
    # Ranks that work on the same samples (tensor parallelism) have equal answers. Each sample counts once.
    found = {one.number: one for of_rank in peers.gather(own) for one in of_rank}
    if not found:
        return None
    _, predictions, references = zip(*(found[number] for number in sorted(found)), strict=True)
    return {name: quality.compute(name, predictions, references) for name in names}


def _place(batch: PromptBatch, copy: BatchCopy) -> tuple[dict[str, Tensor], Tensor | None]:
    tensors = copy({**batch.tensors, "ends": batch.ends})
    ends = tensors.pop("ends")
    return tensors, ends if len(tensors) == 1 else None


def _cut(tokens: list[int], eos: int) -> list[int]:
    return tokens[: tokens.index(eos)] if eos in tokens else tokens
