"""The measured loop: warm-up, window, and what every rank saw of each step."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from bench.data import MicroBatch
from bench.engines import Engine
from bench.measure.clock import Clock
from bench.measure.peers import Peers
from bench.measure.window import closes, is_steady, opens
from bench.spec import RunSpec


class Fetched(NamedTuple):
    """The micro-batches of one optimizer step, and the padding tokens in them."""

    tensors: list[dict[str, torch.Tensor]]  # still on the host
    encoder_padding: int
    decoder_padding: int


@dataclass
class Series:
    """The steps in order, warm-up included: per step the columns below, and every rank's own."""

    # one (ranks, COLUMNS) tensor per step
    ranks: list[torch.Tensor] = field(default_factory=list)
    cut: int = 0
    steady: bool = False
    stopped: str = ""
    window_s: float = 0.0
    skipped: list[int] = field(default_factory=list)

    COLUMNS = ("step_s", "data_wait_s", "loss", "gradient_norm", "encoder_padding", "decoder_padding")

    def column(self, name: str) -> torch.Tensor:
        """Return one column of every step and rank, shape (steps, ranks), float64; NaN where a rank had none."""
        stacked = torch.stack(self.ranks) if self.ranks else torch.zeros(0, 1, len(self.COLUMNS))
        return stacked[:, :, self.COLUMNS.index(name)]

    @property
    def step_s(self) -> list[float]:
        """Seconds of each step: the slowest rank's."""
        return [float(step[:, 0].max()) for step in self.ranks]


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
    ) -> None:
        self.peers = peers
        self._spec, self._engine, self._batches = spec, engine, batches
        self._clock, self._device, self._hook = clock, device, hook
        self._steps = 0

    def fetch(self) -> Fetched:
        """Take the next optimizer step's micro-batches from the loader."""
        self._hook("fetch", self._steps)
        parts = list(itertools.islice(self._batches, self._spec.accumulation))
        return Fetched(
            [part.tensors for part in parts],
            sum(part.encoder_padding for part in parts),
            sum(part.decoder_padding for part in parts),
        )

    def step(self, fetched: Fetched) -> torch.Tensor:
        """Make one optimizer step, the copy to the device included; return the loss, unsynchronised."""
        self._hook("steps", self._steps)
        on_device = [
            {name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()}
            for tensors in fetched.tensors
        ]
        return self._engine.train_step(on_device)

    def block(self, steps: int, series: Series) -> None:
        """Run and time `steps` steps, then gather what every rank saw and append it to `series`."""
        waits, padding = [], []
        losses: list[torch.Tensor | float] = []
        norms: list[torch.Tensor | float | None] = []
        clock, skipped = self._clock, self._engine.skipped_steps()
        self.peers.barrier()
        clock.begin()
        for _ in range(steps):
            asked = time.perf_counter()
            fetched = self.fetch()
            waits.append(time.perf_counter() - asked)
            losses.append(self.step(fetched))
            clock.mark()
            norms.append(self._engine.gradient_norm())
            padding.append((fetched.encoder_padding, fetched.decoder_padding))
            if self._engine.skipped_steps() > skipped:
                skipped = self._engine.skipped_steps()
                series.skipped.append(self._steps)
                # Looking for a loss scale, fp16 overflows now and then; elsewhere gradients that are not finite
                # are the end of the training.
                norms[-1] = None if self._spec.precision == "fp16" else math.inf
            self._steps += 1
        seconds = clock.end()
        if not self.peers.real:  # what others would have sent is missing in both
            losses, norms = [math.nan] * steps, [None] * steps
        rows = [
            (second, waited, float(loss), _number(norm), *pads)
            for second, waited, loss, norm, pads in zip(seconds, waits, losses, norms, padding, strict=True)
        ]
        series.ranks.extend(self.peers.all_gather(torch.tensor(rows, dtype=torch.float64)))


def run(trainer: Trainer, spec: RunSpec, open_window: Callable[[], None], series: Series) -> None:
    """Warm up until steady, then measure until the interval is narrow enough or a budget ends; fill `series` meanwhile.

    `open_window` is called once in between, off the clock.
    """
    protocol, peers = spec.measure, trainer.peers
    sound = _finite if peers.real else _meaningless
    while True:
        trainer.block(min(protocol.block_steps, protocol.warmup_max_steps - len(series.ranks)), series)
        if not sound(series):
            series.stopped = "invalid"
            return
        if peers.agreed(opens(series.step_s, protocol)):
            break
    series.cut = len(series.ranks)
    series.steady = is_steady(series.step_s, protocol.block_steps)
    open_window()
    while not series.stopped:
        done = len(series.ranks) - series.cut
        trainer.block(min(protocol.block_steps, protocol.max_steps - done), series)
        block = series.ranks[series.cut + done :]
        series.window_s += float(torch.stack(block)[:, :, 0].sum(dim=0).max())
        reason = closes(series.step_s[series.cut :], series.window_s, protocol) if sound(series) else "invalid"
        series.stopped = peers.agreed(reason) or ""


def _number(norm: "torch.Tensor | float | None") -> float:
    """Return a gradient norm as a float: NaN where the engine tells none, infinity where it was not finite."""
    value = math.nan if norm is None else float(norm)
    return math.inf if norm is not None and math.isnan(value) else value


def _finite(series: Series) -> bool:
    """Whether every loss so far, and every gradient norm that was told, is a finite number."""
    return bool(series.column("loss").isfinite().all()) and not bool(series.column("gradient_norm").isinf().any())


def _meaningless(series: Series) -> bool:
    """A rehearsal's losses say nothing, so they are not looked at."""
    return True
