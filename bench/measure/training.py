"""Complete training run. Every step is timed as in a measurement window, with evaluations and checkpoints between
blocks of steps.

An evaluation may also measure the quality of the model's answers to held-out prompts. Decoding is greedy: each token is
the most likely token. For each token there is a forward pass over the whole sequence, without a cache of keys and
values. This works with every engine, including engines that partition the weights. Every rank makes the same number of
passes, because such engines communicate in a pass.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from bench import objectives
from bench.core import quality
from bench.core.network import PAD
from bench.core.record import Checkpoint, Evaluation
from bench.core.spec import RunSpec
from bench.core.steps import compute_learning_rate, find_last_step, list_checkpoints, list_evaluations
from bench.core.store import ADAPTER, MODEL
from bench.data import MicroBatch, Prompts
from bench.engines import OptionalMembers
from bench.engines.distributed.ranks import count_targets
from bench.measure import checkpoints
from bench.measure.checkpoints import LearningProgress, SavedTraining
from bench.measure.collectives import wait_for
from bench.measure.loop import BatchCopy, Series, Trainer, create_batch_copy
from bench.measure.peers import Peers
from bench.models.checkpoint.tensors import build_config, save_adapters, save_weights


class Training:
    """Training of one rank in one attempt (one try at a run)."""

    def __init__(
        self,
        spec: RunSpec,
        engine: OptionalMembers,
        held_out: Sequence[MicroBatch],
        folder: Path,
        device: torch.device,
        hook: Callable[[str, int], None],
        prompts: Prompts | None = None,
        inputs: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Create the training of a rank.

        `held_out` are this rank's micro-batches of the held-out data. `prompts` are its held-out prompts; None if no
        quality is measured. `inputs` has hashes of the data and of the initial weights, by key. `hook` is called at the
        beginning of each phase, with the phase and the number of optimizer steps so far.
        """
        self._spec, self._engine, self._held_out, self._prompts = spec, engine, held_out, prompts
        self._folder, self._device, self._hook, self._inputs = folder, device, hook, inputs
        self._copy = create_batch_copy(device, pinned=False)
        self.steps = 0  # optimizer steps so far, over all attempts
        self._before_s = 0.0  # seconds of the steps of earlier attempts
        self.evaluations: list[Evaluation] = []
        self.checkpoints: list[Checkpoint] = []
        if spec.learning.save_model and spec.adapter.rank is None:
            build_config(spec)  # raises for a model that transformers lacks, before time is spent on the training

    def resume(self, saved: SavedTraining) -> None:
        """Load model, optimizer and progress from a checkpoint that another attempt (try at this run) wrote. All ranks
        must call this. Raise UserError if the checkpoint is of a training with other inputs."""
        saved.check_inputs(self._inputs)
        begin = time.perf_counter()
        self.steps = self._engine.load(saved.folder)
        progress = saved.read_progress()
        self._before_s, self.evaluations = progress.trained_s, list(progress.evaluations)
        self._note_checkpoint("load", begin, checkpoints.count_bytes(saved.folder))

    def set_learning_rate(self, step: int) -> None:
        """Set the learning rate for the optimizer step with this number."""
        self._engine.set_learning_rate(compute_learning_rate(self._spec, step))

    def run(
        self, trainer: Trainer, open_window: Callable[[], None], series: Series, after_block: Callable[[], None]
    ) -> None:
        """Train until all tokens are used or a loss is not finite, and fill `series`.

        The window begins after the protocol's minimum number of warm-up steps, and ends with the training.
        `open_window` is called when the window begins, and `after_block` after every block of steps.
        """
        spec, last = self._spec, find_last_step(self._spec)
        warm = self.steps + min(spec.measure.warmup_steps, last - self.steps - 1)
        evaluated, saved = set(list_evaluations(spec)), set(list_checkpoints(spec))
        # Blocks end at these steps, so that nothing happens inside a timed block.
        stops = sorted({warm, last} | evaluated | saved)
        if not self.steps:
            self._evaluate(trainer, series)
        while self.steps < last:
            if self.steps == warm:
                series.window_start = len(series.ranks)
                open_window()
            stop, since = next(step for step in stops if step > self.steps), len(series.ranks)
            count = min(spec.measure.block_steps, stop - self.steps)
            trainer.block(count, series)
            # Evaluations and checkpoints after a block must not be timed as part of a step.
            trainer.finish(series)
            self.steps += count
            after_block()
            if not series.is_finite(since):
                series.stopped = "invalid"
                return
            if self.steps in evaluated:
                self._evaluate(trainer, series)
            if self.steps in saved:
                self._save(trainer, series)
        series.stopped = "steps"
        if spec.learning.save_model:
            self._save_model(trainer)

    def _evaluate(self, trainer: Trainer, series: Series) -> None:
        """Append an evaluation: the mean loss per target token of the held-out samples, and the quality of answers if
        there are held-out prompts. All ranks must call this."""
        begin = time.perf_counter()
        objective = objectives.load(self._spec.objective)
        losses, targets = [], []
        for batch in self._held_out:
            self._hook("evaluation", self.steps)
            count = int(count_targets(objective.KINDS, batch.tensors))
            loss = self._engine.evaluate([self._copy(batch.tensors)])
            assert loss is not None
            weight = count if objective.REDUCTION == "mean" else 1
            # Without target tokens, the mean loss is NaN.
            losses.append(float(loss) * weight if count else 0.0)
            targets.append(float(count))
        found = None
        if self._prompts is not None:
            hook = partial(self._hook, "evaluation", self.steps)
            answers = answer_prompts(self._engine, self._prompts, self._copy, hook)
            found = measure_quality(self._spec.learning.quality, answers, trainer.peers)
        wait_for(self._device)
        own = torch.tensor([[sum(losses), sum(targets)]], dtype=torch.float64)  # (1, 2): one row per rank
        loss_sum, target_sum = trainer.peers.all_gather(own)[0].sum(dim=0).tolist()
        self.evaluations.append(
            Evaluation(
                step=self.steps,
                loss=loss_sum / target_sum if math.isfinite(loss_sum) else None,
                target_tokens=int(target_sum),
                seconds=time.perf_counter() - begin,
                trained_s=self._before_s + sum(series.step_s),
                quality=found,
            )
        )

    def _save(self, trainer: Trainer, series: Series) -> None:
        """Write a checkpoint. It becomes complete after every rank has written its part. All ranks must call this."""
        self._hook("checkpoint", self.steps)
        begin, size = time.perf_counter(), 0
        self._engine.save(checkpoints.find_unfinished(self._folder, self.steps), self.steps)
        trainer.peers.barrier()
        if trainer.peers.is_main:
            trained_s = self._before_s + sum(series.step_s)
            done = tuple(self.evaluations)
            progress = LearningProgress(trained_s=trained_s, evaluations=done, inputs=dict(self._inputs))
            size = checkpoints.complete(self._folder, self.steps, progress)
        self._note_checkpoint("save", begin, size)

    def _save_model(self, trainer: Trainer) -> None:
        """Write the trained model in transformers' format, or its adapters in peft's. All ranks must call this."""
        self._hook("model", self.steps)
        begin, is_adapted, size = time.perf_counter(), self._spec.adapter.rank is not None, 0
        name, save = (ADAPTER, save_adapters) if is_adapted else (MODEL, save_weights)
        unfinished, weights = self._folder / f".{name}", self._engine.list_weights(only_trained=is_adapted)
        save(self._spec, weights, unfinished, is_main=trainer.peers.is_main)
        if trainer.peers.is_main:
            size = checkpoints.count_bytes(unfinished.rename(self._folder / name))
        trainer.peers.barrier()
        self._note_checkpoint("model", begin, size)

    def _note_checkpoint(self, kind: str, begin: float, size: int) -> None:
        seconds = time.perf_counter() - begin
        self.checkpoints.append(
            Checkpoint.model_validate({"kind": kind, "step": self.steps, "seconds": seconds, "bytes": size})
        )


# ---------------------------------------- answers to prompts


class Answer(NamedTuple):
    """Answer to a held-out prompt."""

    number: int  # number of the sample
    prediction: str
    reference: str


def generate_answers(engine: OptionalMembers, tensors: dict[str, Tensor], ends: Tensor | None, limit: int) -> Tensor:
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


def answer_prompts(
    engine: OptionalMembers, prompts: Prompts, copy: BatchCopy, before_batch: Callable[[], None]
) -> list[Answer]:
    """Return the model's answers to all prompts of this rank. `before_batch` is called before each batch of prompts.
    All ranks must call this."""
    answers = list[Answer]()
    for batch in prompts.batches:
        before_batch()
        tensors = copy({**batch.tensors, "ends": batch.ends})
        ends = tensors.pop("ends")
        tokens = generate_answers(engine, tensors, ends if len(tensors) == 1 else None, prompts.limit)
        until_eos = (takewhile(lambda token: token != prompts.eos, row) for row in tokens.tolist())
        texts = [prompts.decode(list(row)) for row in until_eos]
        answers += map(Answer, batch.numbers, texts, batch.references)
    return answers


def measure_quality(names: Sequence[str], own: list[Answer], peers: Peers) -> dict[str, float] | None:
    """Return the value of each quality measure in `names` over the answers of all ranks. `own` are this rank's answers.
    Return None on every rank except the main rank. All ranks must call this."""
    # Ranks that work on the same samples (tensor parallelism) have equal answers. Each sample counts once.
    found = {one.number: one for of_rank in peers.gather(own) for one in of_rank}
    if not found:
        return None
    _, predictions, references = zip(*(found[number] for number in sorted(found)), strict=True)
    return {name: quality.compute(name, predictions, references) for name in names}
