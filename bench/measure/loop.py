"""The measured loop: warm-up, window, and what every rank saw of each step."""

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from bench.data import MicroBatch
from bench.engines import Engine
from bench.measure.clock import Clock
from bench.measure.failures import Refused
from bench.measure.peers import Peers
from bench.measure.window import find_stop_reason, is_steady, is_warmup_done, warmup_s
from bench.spec import RunSpec
from bench.step_times import compute_step_s


@dataclass
class FetchedBatches:
    """What the micro-batches of one optimizer step took and held."""

    wait_s: float = 0.0  # until they were there
    padding: Counter[str] = field(default_factory=Counter)  # by kind of tokens


@dataclass
class Series:
    """The steps in order, warm-up included: per step its columns, and every rank's own."""

    kinds: tuple[str, ...]  # of tokens, each with a column of its padding
    loss_ranks: tuple[int, ...] | None = None  # which have a loss; None: all
    # one (ranks, columns) tensor per step
    ranks: list[torch.Tensor] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)  # steps between two barriers
    cut: int | None = None  # first step of the window; None before there is one
    steady: bool = False
    stopped: str = ""
    skipped: list[int] = field(default_factory=list)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return "step_s", "data_wait_s", "loss", "gradient_norm", *(f"{kind}_padding" for kind in self.kinds)

    def column(self, name: str) -> torch.Tensor:
        """Return one column of every step and rank, shape (steps, ranks), float64; NaN where a rank had none."""
        stacked = torch.stack(self.ranks) if self.ranks else torch.zeros(0, 1, len(self.columns))
        return stacked[:, :, self.columns.index(name)]

    @property
    def losses(self) -> torch.Tensor:
        """The losses of every step on the ranks that have one, shape (steps, those ranks)."""
        losses = self.column("loss")
        return losses if self.loss_ranks is None else losses[:, list(self.loss_ranks)]

    @property
    def step_s(self) -> list[float]:
        """Seconds of each step, from the slowest rank's completion of the one before to that of this one."""
        return compute_step_s(self.column("step_s").numpy(), self.blocks)

    @property
    def warmup(self) -> int:
        """How many steps came before the window: all of them, where none was opened."""
        return len(self.ranks) if self.cut is None else self.cut

    @property
    def window_s(self) -> float:
        """Seconds of the window: of its blocks, without what lies between them."""
        return sum(self.step_s[self.warmup :])


class Trainer:
    """One rank's side of the loop: fetch, step, time; what is gathered is gathered between blocks, off the clock."""

    def __init__(
        self,
        spec: RunSpec,
        engine: Engine,
        batches: Iterator[MicroBatch],
        clock: Clock,
        device: torch.device,
        hook: Callable[[str, int], None],
        peers: Peers,
        *,
        has_loss: bool = True,
    ) -> None:
        self.peers = peers
        self._spec, self._engine, self._batches = spec, engine, batches
        self._clock, self._device, self._hook = clock, device, hook
        self._has_loss = has_loss
        self._steps = 0

    @property
    def on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def step(self) -> tuple[torch.Tensor | None, FetchedBatches]:
        """Make one optimizer step, its data's fetch and copy to the device included; return the loss, unsynchronised,
        None on a rank without one, and what was fetched."""
        fetched = FetchedBatches()
        loss = self._engine.train_step(self._micro_batches(fetched))
        if (loss is not None) != self._has_loss:
            returned, others = ("no loss", "has one") if self._has_loss else ("a loss", "has none")
            raise Refused(f"train_step returned {returned} on a rank that by its engine's facts {others}")
        self._steps += 1
        return loss, fetched

    def _micro_batches(self, fetched: FetchedBatches) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the next optimizer step's micro-batches, each taken from the loader when the engine asks for it."""
        for _ in range(self._spec.accumulation):
            begin = time.perf_counter()
            self._hook("fetch", self._steps)
            batch = next(self._batches)
            fetched.wait_s += time.perf_counter() - begin
            fetched.padding.update(batch.padding)
            self._hook("steps", self._steps)
            yield {name: tensor.to(self._device, non_blocking=True) for name, tensor in batch.tensors.items()}

    def block(self, steps: int, series: Series) -> None:
        """Run and time `steps` steps, then gather what every rank saw and append it to `series`."""
        data: list[FetchedBatches] = []
        losses: list[torch.Tensor | float | None] = []
        norms: list[torch.Tensor | float | None] = []
        clock, skipped = self._clock, self._engine.skipped_steps()
        self.peers.barrier()
        clock.begin()
        for _ in range(steps):
            loss, fetched = self.step()
            clock.mark()
            losses.append(loss)
            data.append(fetched)
            norms.append(self._engine.gradient_norm())
            if self._engine.skipped_steps() > skipped:
                skipped = self._engine.skipped_steps()
                series.skipped.append(self._steps - 1)
                # Looking for a loss scale, fp16 overflows now and then; elsewhere gradients that are not finite
                # are the end of the training.
                norms[-1] = None if self._spec.precision == "fp16" else math.inf
        seconds = clock.end()
        if not self.peers.are_real:  # what others would have sent is missing in both
            losses, norms = [math.nan] * steps, [None] * steps
        rows = [
            (
                second,
                fetched.wait_s,
                _convert_loss(loss),
                _convert_norm(norm),
                *(fetched.padding[kind] for kind in series.kinds),
            )
            for second, fetched, loss, norm in zip(seconds, data, losses, norms, strict=True)
        ]
        series.ranks.extend(self.peers.all_gather(torch.tensor(rows, dtype=torch.float64)))
        series.blocks.append(steps)


def run(
    trainer: Trainer,
    spec: RunSpec,
    open_window: Callable[[], None],
    series: Series,
    after_block: Callable[[], None] = lambda: None,
) -> None:
    """Warm up until steady, then measure until the interval is narrow enough or a budget ends; fill `series` meanwhile.

    `open_window` is called once in between, `after_block` after every block of the window, both off the clock.
    """
    protocol, peers = spec.measure, trainer.peers
    sound = _is_finite if peers.are_real else _is_unchecked
    least_s = warmup_s(protocol, on_gpu=trainer.on_gpu)
    while True:
        left = protocol.warmup_max_steps - len(series.ranks)
        trainer.block(min(protocol.block_steps, left) if left > 0 else protocol.block_steps, series)
        if not sound(series):
            series.stopped = "invalid"
            return
        if peers.broadcast(is_warmup_done(series.step_s, protocol, least_s)):
            break
    series.cut = len(series.ranks)
    series.steady = is_steady(series.step_s, protocol.block_steps)
    open_window()
    while not series.stopped:
        done = len(series.ranks) - series.warmup
        trainer.block(min(protocol.block_steps, protocol.max_steps - done), series)
        after_block()
        reason = (
            find_stop_reason(series.step_s[series.warmup :], series.window_s, protocol) if sound(series) else "invalid"
        )
        series.stopped = peers.broadcast(reason) or ""


def _convert_loss(loss: "torch.Tensor | float | None") -> float:
    """Return a loss as a float: NaN where the rank has none."""
    return math.nan if loss is None else float(loss)


def _convert_norm(norm: "torch.Tensor | float | None") -> float:
    """Return a gradient norm as a float: NaN where the engine tells none, infinity where it was not finite."""
    value = math.nan if norm is None else float(norm)
    return math.inf if norm is not None and math.isnan(value) else value


def _is_finite(series: Series) -> bool:
    """Whether every loss so far, and every gradient norm that was told, is a finite number."""
    return bool(series.losses.isfinite().all()) and not bool(series.column("gradient_norm").isinf().any())


def _is_unchecked(series: Series) -> bool:
    """A rehearsal's losses say nothing, so they are not looked at."""
    return True
