"""A training to its end: every step timed as in a window, and between blocks of steps the held-out loss and the
checkpoints."""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from bench import objectives
from bench.core.record import Checkpoint, Evaluation
from bench.core.spec import RunSpec
from bench.core.steps import compute_learning_rate, find_last_step, list_checkpoints, list_evaluations
from bench.data import MicroBatch
from bench.engines import OptionalMembers
from bench.engines.distributed.ranks import count_targets
from bench.measure import checkpoints
from bench.measure.checkpoints import LearningProgress, SavedTraining
from bench.measure.collectives import wait_for
from bench.measure.loop import Series, Trainer, create_batch_copy


class Training:
    """One rank's side of a training, in one attempt."""

    def __init__(
        self,
        spec: RunSpec,
        engine: OptionalMembers,
        held_out: Sequence[MicroBatch],
        folder: Path,
        device: torch.device,
        hook: Callable[[str, int], None],
    ) -> None:
        """`held_out` are this rank's micro-batches; `hook` hears what this rank is about to do, and behind how many
        steps."""
        self._spec, self._engine, self._held_out = spec, engine, held_out
        self._folder, self._device, self._hook = folder, device, hook
        self._copy = create_batch_copy(device, pinned=False)
        self.steps = 0  # so far, over all attempts
        self._before_s = 0.0  # of the steps of earlier attempts
        self.evaluations: list[Evaluation] = []
        self.checkpoints: list[Checkpoint] = []

    def take_up(self, saved: SavedTraining) -> None:
        """Go on from a checkpoint of another attempt. Collective."""
        begin = time.perf_counter()
        self.steps = self._engine.load(saved.folder)
        progress = checkpoints.read_progress(saved)
        self._before_s, self.evaluations = progress.trained_s, list(progress.evaluations)
        size = sum(file.stat().st_size for file in saved.folder.rglob("*") if file.is_file())
        loaded = Checkpoint(kind="load", step=self.steps, seconds=time.perf_counter() - begin, bytes=size)
        self.checkpoints.append(loaded)

    def set_learning_rate(self, step: int) -> None:
        """Give the next optimizer step, which has this number, its learning rate."""
        self._engine.set_learning_rate(compute_learning_rate(self._spec, step))

    def run(
        self, trainer: Trainer, open_window: Callable[[], None], series: Series, after_block: Callable[[], None]
    ) -> None:
        """Train until all tokens are spent, or the numbers are no numbers any more; fill `series` meanwhile. The window
        begins behind the protocol's fewest warm-up steps and ends with the training."""
        spec, last = self._spec, find_last_step(self._spec)
        warm = self.steps + min(spec.measure.warmup_steps, last - self.steps - 1)
        evaluated, saved = set(list_evaluations(spec)), set(list_checkpoints(spec))
        stops = sorted({warm, last} | evaluated | saved)
        if not self.steps:
            self._evaluate(trainer, series)
        while self.steps < last and not series.stopped:
            if self.steps == warm:
                series.cut = len(series.ranks)
                open_window()
            stop = next(step for step in stops if step > self.steps)
            self._make_steps(trainer, series, min(spec.measure.block_steps, stop - self.steps))
            after_block()
            if series.stopped:
                return
            if self.steps in evaluated:
                self._evaluate(trainer, series)
            if self.steps in saved:
                self._save(trainer, series)
        series.stopped = "steps"

    def _make_steps(self, trainer: Trainer, series: Series, count: int) -> None:
        since = len(series.ranks)
        trainer.block(count, series)
        trainer.finish(series)  # what comes between blocks is not to be timed as a step
        self.steps += count
        if not series.is_finite(since):
            series.stopped = "invalid"

    def _evaluate(self, trainer: Trainer, series: Series) -> None:
        """Take the loss over all target tokens of the held-out samples. Collective."""
        begin = time.perf_counter()
        objective = objectives.load(self._spec.objective)
        losses, targets = [], []
        for batch in self._held_out:
            self._hook("evaluation", self.steps)
            count = int(count_targets(objective.KINDS, batch.tensors))
            loss = self._engine.evaluate([self._copy(batch.tensors)])
            assert loss is not None
            weight = count if objective.REDUCTION == "mean" else 1
            losses.append(float(loss) * weight if count else 0.0)  # without a target, the mean loss is no number
            targets.append(float(count))
        wait_for(self._device)
        mine = torch.tensor([[sum(losses), sum(targets)]], dtype=torch.float64)
        loss_sum, target_sum = trainer.peers.all_gather(mine)[0].sum(dim=0).tolist()
        self.evaluations.append(
            Evaluation(
                step=self.steps,
                loss=loss_sum / target_sum if math.isfinite(loss_sum) else None,
                target_tokens=int(target_sum),
                seconds=time.perf_counter() - begin,
                trained_s=self._before_s + sum(series.step_s),
            )
        )

    def _save(self, trainer: Trainer, series: Series) -> None:
        """Write a checkpoint, which is there once every rank has written its part. Collective."""
        self._hook("checkpoint", self.steps)
        begin = time.perf_counter()
        self._engine.save(checkpoints.find_unfinished(self._folder, self.steps), self.steps)
        trainer.peers.barrier()
        size = 0
        if trainer.peers.is_main:
            trained_s = self._before_s + sum(series.step_s)
            progress = LearningProgress(trained_s=trained_s, evaluations=tuple(self.evaluations))
            size = checkpoints.complete(self._folder, self.steps, progress)
        self.checkpoints.append(
            Checkpoint(kind="save", step=self.steps, seconds=time.perf_counter() - begin, bytes=size)
        )
