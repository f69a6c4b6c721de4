"""The measured loop: warm-up, window, and the times and losses of every step on every rank.

The lengths of both are fixed before the run. An end that depends on the measured times would bias the mean by which
configurations are ranked: a window with a stall would be prolonged, and the stall diluted.

Rank 0 decides between blocks of steps, and the other ranks follow: with a decision per rank, some would wait forever.

The copy of a micro-batch on a side stream follows torch's notes on CUDA semantics, and has not been tried on a GPU yet.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from bench.core.spec import MeasureSpec, RunSpec
from bench.core.statistics import series_interval
from bench.core.steps import StepTimes
from bench.data import MicroBatch
from bench.engines import Engine
from bench.measure.clock import Clock, ReadBlock
from bench.measure.failures import Refused
from bench.measure.peers import Peers

BatchCopy = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
"""Copies a micro-batch to a device; the result is ready for work that is launched next."""


def create_batch_copy(device: torch.device, *, pinned: bool) -> BatchCopy:
    """Return the function that copies micro-batches to `device`; a CPU ignores `pinned`."""
    if device.type == "cuda" and pinned:
        return SideStreamCopy(device)
    # On the computing stream. From pageable memory the driver first makes a copy of its own, and may wait for the
    # stream (CUDA driver API, "API synchronization behavior"): then the host cannot run ahead.
    return lambda tensors: {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


class SideStreamCopy:
    """Copies from page-locked memory on a stream of its own, while the device computes earlier work."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors on the device; work that is launched next waits for them, the host does not."""
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            # The allocator of page-locked memory notes the copy, and frees no tensor before it has been copied.
            pinned = {name: tensor if tensor.is_pinned() else tensor.pin_memory() for name, tensor in tensors.items()}
            copied = {name: tensor.to(self._device, non_blocking=True) for name, tensor in pinned.items()}
        computing.wait_stream(self._stream)
        for tensor in copied.values():
            # Else the allocator would give the memory to the next copy while the computing stream still reads it.
            tensor.record_stream(computing)
        return copied


WindowEnd = Literal["window", "time", "slower"]
# Level of the interval that ends a trial early: higher than 95 %, since it is computed after every block.
_SLOWER_LEVEL = 0.998


def is_warmup_done(steps: int, elapsed_s: float, protocol: MeasureSpec, *, on_gpu: bool) -> bool:
    """Return whether the warm-up has its steps and, on a GPU, its seconds.

    Under load a GPU's clock settles with its temperature, in half a minute or more.
    """
    return steps >= protocol.warmup_steps and (not on_gpu or elapsed_s >= protocol.gpu_warmup_s)


def is_slower(step_s: Sequence[float], than_s: float, block: int) -> bool:
    """Return whether the median step surely takes longer than `than_s` seconds; False before two blocks."""
    interval = series_interval(step_s, _SLOWER_LEVEL) if len(step_s) >= 2 * block else None
    return interval is not None and interval[0] > than_s


def find_stop_reason(steps: int, elapsed_s: float, protocol: MeasureSpec) -> WindowEnd | None:
    """Return why the window ends now, or None.

    `steps` are the window's, launched ones included, `elapsed_s` its seconds so far. A window has at least the
    protocol's seconds and steps. If its steps are too long for that, it ends after the protocol's longest time.
    """
    if elapsed_s >= protocol.window_s and steps >= protocol.min_steps:
        return "window"
    return "time" if elapsed_s >= protocol.max_s else None


Reading = torch.Tensor | float | None
"""A loss or a norm of one step, perhaps still on its way from the device."""


@dataclass
class FetchedBatches:
    """Waiting time and padding of the micro-batches of one optimizer step."""

    wait_s: float = 0.0
    padding: Counter[str] = field(default_factory=Counter)  # by kind of tokens


@dataclass
class LaunchedBlock:
    """Steps whose work has been launched, and may not have finished."""

    read_seconds: ReadBlock
    fetched: list[FetchedBatches]  # by step, as the losses and norms
    losses: list[Reading]
    norms: list[Reading]
    skipped: list[int]  # steps, counted from the first step of this process
    together: bool  # all ranks began it together


@dataclass
class Series:
    """All steps in order, warm-up included: their times, and the columns of every rank."""

    kinds: tuple[str, ...]  # of tokens; each has a column of its padding
    loss_ranks: tuple[int, ...] | None = None  # ranks with a loss; None: all
    ranks: list[torch.Tensor] = field(default_factory=list)  # per step: (ranks, columns)
    times: StepTimes = field(default_factory=StepTimes)
    window_start: int | None = None  # first step of the window; None before the window
    stopped: str = ""
    skipped: list[int] = field(default_factory=list)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return "step_s", "data_wait_s", "loss", "gradient_norm", *(f"{kind}_padding" for kind in self.kinds)

    def column(self, name: str) -> torch.Tensor:
        """Return one column of every step and rank, (steps, ranks), float64; NaN where a rank has no value."""
        stacked = torch.stack(self.ranks) if self.ranks else torch.zeros(0, 1, len(self.columns))
        return stacked[:, :, self.columns.index(name)]

    @property
    def losses(self) -> torch.Tensor:
        """Losses of every step on the ranks that have one, (steps, ranks with a loss)."""
        losses = self.column("loss")
        return losses if self.loss_ranks is None else losses[:, list(self.loss_ranks)]

    @property
    def step_s(self) -> list[float]:
        """Seconds of each step, from the slowest rank's completion of the step before to its completion of this one."""
        return self.times.step_s

    def append(self, ranks: list[torch.Tensor], skipped: list[int], *, together: bool) -> None:
        """Add the steps of a block, which all ranks began `together`, or right after the block before."""
        self.ranks.extend(ranks)
        own_s = torch.stack(ranks)[:, :, self.columns.index("step_s")]  # (steps, ranks)
        self.times.append(own_s.numpy(), together=together)
        self.skipped.extend(skipped)

    def is_finite(self, since: int) -> bool:
        """Return whether every loss and every known gradient norm from step `since` on is finite."""
        if since >= len(self.ranks):
            return True
        latest = Series(self.kinds, self.loss_ranks, self.ranks[since:])
        # NaN in the column of norms means that the engine reports none; a norm that is not finite is infinite there.
        return bool(latest.losses.isfinite().all()) and not bool(latest.column("gradient_norm").isinf().any())

    @property
    def warmup(self) -> int:
        """Number of steps before the window: all steps if there is no window."""
        return len(self.ranks) if self.window_start is None else self.window_start

    @property
    def window_s(self) -> float:
        """Seconds of the window's blocks, without the time between them."""
        return sum(self.step_s[self.warmup :])


class Trainer:
    """One rank's side of the loop: fetch, step, time. Results are gathered between blocks, and not timed."""

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
        first: int = 0,
        before_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`hook` gets the phase and the step before each of them begins, `before_step` the number of each step.

        `first` is the number of the first step.
        """
        self.peers = peers
        self.on_gpu = device.type == "cuda"
        self._spec, self._engine, self._batches = spec, engine, batches
        self._clock, self._hook = clock, hook
        self._copy = create_batch_copy(device, pinned=spec.data.pin_memory)
        self._has_loss = has_loss
        self._steps = self._first = first
        self._before_step = before_step
        self._launched: deque[LaunchedBlock] = deque()

    def step(self) -> tuple[torch.Tensor | None, FetchedBatches]:
        """Make one optimizer step, with the fetch and copy of its data.

        Return the loss, not synchronised, or None on a rank without a loss, and the batches' facts.
        """
        fetched = FetchedBatches()
        self._before_step(self._steps)
        # Before the first fetch: until its first micro-batch, a rank of a pipeline waits for its neighbours.
        self._hook("steps", self._steps)
        loss = self._engine.train_step(self._fetch_micro_batches(fetched))
        if (loss is not None) != self._has_loss:
            returned, expected = ("no loss", "has one") if self._has_loss else ("a loss", "has none")
            raise Refused(f"train_step returned {returned} on a rank that by its engine's facts {expected}")
        self._steps += 1
        return loss, fetched

    def _fetch_micro_batches(self, fetched: FetchedBatches) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the micro-batches of an optimizer step, each fetched when the engine requests it."""
        for _ in range(self._spec.accumulation):
            begin = time.perf_counter()
            self._hook("fetch", self._steps)
            batch = next(self._batches)
            fetched.wait_s += time.perf_counter() - begin
            fetched.padding.update(batch.padding)
            self._hook("steps", self._steps)
            yield self._copy(batch.tensors)

    def block(self, steps: int, series: Series) -> None:
        """Run and time `steps` steps, and append finished blocks to `series`.

        On a CPU a block is appended at once, on a GPU while the next block runs.
        """
        # Only a block after a drain begins with a barrier. Others follow the block before without any waiting.
        together = not self._launched
        if together:
            self.peers.barrier()
            self._clock.drain()
        self._launched.append(self._launch(steps, together))
        while len(self._launched) > self._clock.blocks_ahead:
            self._gather(self._launched.popleft(), series)

    def finish(self, series: Series) -> None:
        """Wait for all launched blocks and append them to `series`."""
        while self._launched:
            self._gather(self._launched.popleft(), series)

    @property
    def steps_under_way(self) -> int:
        """Number of launched steps that are in no series yet."""
        return sum(len(block.fetched) for block in self._launched)

    def _launch(self, steps: int, together: bool) -> LaunchedBlock:
        losses, norms, data = list[Reading](), list[Reading](), list[FetchedBatches]()
        found = list[int]()
        clock, skipped = self._clock, self._engine.skipped_steps()
        clock.begin()
        for _ in range(steps):
            loss, fetched = self.step()
            clock.mark()
            losses.append(loss)
            data.append(fetched)
            norms.append(self._engine.gradient_norm())
            if self._engine.skipped_steps() > skipped:
                skipped = self._engine.skipped_steps()
                found.append(self._steps - 1 - self._first)
                # While fp16 adjusts its loss scale, gradients overflow now and then. In other precisions gradients
                # that are not finite end the training.
                norms[-1] = None if self._spec.precision == "fp16" else math.inf
        # The other ranks' contributions are missing from both.
        if not self.peers.are_real:
            losses, norms = [math.nan] * steps, [None] * steps
        # Before the block ends, since its end is waited for.
        losses, norms = _send_to_host(losses), _send_to_host(norms)
        return LaunchedBlock(clock.end(), data, losses, norms, found, together)

    def _gather(self, block: LaunchedBlock, series: Series) -> None:
        rows = []
        for seconds, fetched, loss, norm in zip(
            block.read_seconds(), block.fetched, block.losses, block.norms, strict=True
        ):
            # A norm is NaN if the engine has none, and infinite if it was not finite.
            norm_value = math.nan if norm is None else math.inf if math.isnan(norm) else float(norm)
            loss_value = math.nan if loss is None else float(loss)
            padding = (fetched.padding[kind] for kind in series.kinds)
            rows.append((seconds, fetched.wait_s, loss_value, norm_value, *padding))
        ranks = self.peers.all_gather(torch.tensor(rows, dtype=torch.float64))
        series.append(ranks, block.skipped, together=block.together)


def run(
    trainer: Trainer,
    protocol: MeasureSpec,
    open_window: Callable[[], None],
    series: Series,
    after_block: Callable[[], None] = lambda: None,
    limit_s: float | None = None,
) -> None:
    """Warm up, then measure a window, both of the protocol's length; fill `series` meanwhile.

    `open_window` is called once in between, `after_block` after every block of the window; neither is timed. The window
    also ends once steps surely take longer than `limit_s` seconds. Steps that are still running at a decision belong to
    the warm-up, or to the window, that it ends.
    """
    peers, checked = trainer.peers, 0

    def is_valid() -> bool:
        nonlocal checked
        since, checked = checked, len(series.ranks)
        if peers.are_real and not series.is_finite(since):
            series.stopped = "invalid"
        return series.stopped != "invalid"

    done = False
    while not done:
        launched = len(series.ranks) + trainer.steps_under_way
        trainer.block(_count_block_steps(protocol, protocol.warmup_steps - launched), series)
        if not is_valid():
            return
        seconds = sum(series.step_s)
        done = peers.broadcast(is_warmup_done(len(series.ranks), seconds, protocol, on_gpu=trainer.on_gpu))
    trainer.finish(series)
    if not is_valid():
        return
    series.window_start = len(series.ranks)
    open_window()
    while not series.stopped:
        launched = len(series.ranks) - series.warmup + trainer.steps_under_way
        trainer.block(_count_block_steps(protocol, protocol.min_steps - launched), series)
        after_block()
        reason = "invalid"
        if is_valid():
            steps = len(series.ranks) - series.warmup + trainer.steps_under_way
            reason = find_stop_reason(steps, series.window_s, protocol) or ""
            if limit_s is not None and is_slower(series.step_s[series.warmup :], limit_s, protocol.block_steps):
                reason = "slower"
        series.stopped = peers.broadcast(reason)
    trainer.finish(series)
    is_valid()


def _count_block_steps(protocol: MeasureSpec, lacking: int) -> int:
    """Return the steps of the next block: at most those that are lacking, or a whole block if only seconds are."""
    return min(protocol.block_steps, lacking) if lacking > 0 else protocol.block_steps


def _send_to_host(values: list[Reading]) -> list[Reading]:
    """Return the values with those on a device on their way to page-locked memory, without waiting for them."""
    return [
        value.detach().to("cpu", non_blocking=True) if isinstance(value, torch.Tensor) else value for value in values
    ]
