"""Measured training loop: the warm-up, then the window of timed steps. It collects the times and losses of every step
on every rank.

The lengths of warm-up and window are fixed before the run. If the end of the window depended on measured times, the
mean step time would be biased. A window with a stall, for example, would be prolonged, and the stall would have less
weight.

Rank 0 decides between blocks of steps whether to continue, and the other ranks follow. If each rank decided by itself,
decisions could differ, and some ranks would wait forever for ranks that have stopped.

The copy of micro-batches on a side stream follows torch's notes on CUDA semantics.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from bench.core.spec import MeasureSpec, RunSpec
from bench.core.statistics import series_interval, series_mean_interval
from bench.core.steps import StepTimes
from bench.data import MicroBatch
from bench.engines import Engine
from bench.measure.clock import Clock, ReadBlock
from bench.measure.failures import Refused
from bench.measure.peers import Peers

BatchCopy = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
"""Function that copies a micro-batch to a device. Work that is launched on the device after the call can use the copy.
"""


def create_batch_copy(device: torch.device, *, pinned: bool) -> BatchCopy:
    """Return the function that copies micro-batches to `device`.

    With `pinned`, a GPU copies from page-locked memory on a side stream. A CPU ignores `pinned`.
    """
    if device.type == "cuda" and pinned:
        return _create_side_stream_copy(device)
    # This copies on the computing stream. For pageable memory, the driver first makes its own copy and may wait for
    # the stream (CUDA driver API, "API synchronization behavior"). The host then cannot run ahead of the device.
    return lambda tensors: {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}


def _create_side_stream_copy(device: torch.device) -> BatchCopy:
    """Return a function that copies from page-locked memory on a separate stream, while the device computes earlier
    work. Work launched next waits for the copies, but the host does not wait."""
    stream = torch.cuda.Stream(device)

    def copy(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        computing = torch.cuda.current_stream(device)
        with torch.cuda.stream(stream):
            # torch's allocator of page-locked memory records the copy. It reuses no memory before the copy is done.
            pinned = {name: tensor if tensor.is_pinned() else tensor.pin_memory() for name, tensor in tensors.items()}
            copied = {name: tensor.to(device, non_blocking=True) for name, tensor in pinned.items()}
        computing.wait_stream(stream)
        for tensor in copied.values():
            # Otherwise the allocator could reuse the memory for the next copy while the computing stream reads it.
            tensor.record_stream(computing)
        return copied

    return copy


WindowEnd = Literal["window", "time", "slower"]
# Confidence level for ending a run early because it is slower than a limit. It is above 95 %, because the interval is
# computed after every block, and each time it could be wrong by chance.
_SLOWER_LEVEL = 0.998


def is_warmup_done(steps: int, elapsed_s: float, protocol: MeasureSpec, *, on_gpu: bool) -> bool:
    """Return True if the warm-up has its minimum number of steps and, on a GPU, its minimum number of seconds.

    Under load, the clock frequency of a GPU changes with its temperature and needs half a minute or more to settle.
    """
    return steps >= protocol.warmup_steps and (not on_gpu or elapsed_s >= protocol.gpu_warmup_s)


def is_slower(step_s: Sequence[float], than_s: float, block: int) -> bool:
    """Return True if the whole confidence intervals of the mean and of the median step time lie above `than_s` seconds.
    A search may compare trials by either. `block` is the number of steps in a block.

    Return False if there are fewer than two blocks of steps, or no interval can be computed.
    """
    if len(step_s) < 2 * block:
        return False
    intervals = series_mean_interval(step_s, _SLOWER_LEVEL), series_interval(step_s, _SLOWER_LEVEL)
    return all(interval is not None and interval[0] > than_s for interval in intervals)


def find_stop_reason(steps: int, elapsed_s: float, protocol: MeasureSpec) -> WindowEnd | None:
    """Return "window" or "time" if the window must end now, and None if it continues.

    `steps` is the number of steps in the window, including launched steps that have not finished. `elapsed_s` is the
    length of the window so far in seconds. The window ends normally ("window") when it has the protocol's minimum
    seconds and minimum steps. If the steps are too slow for that, it ends after the protocol's maximum time ("time").
    """
    if elapsed_s >= protocol.window_s and steps >= protocol.min_steps:
        return "window"
    return "time" if elapsed_s >= protocol.max_s else None


Reading = torch.Tensor | float | None
"""Loss or gradient norm of a step, possibly still being copied from the device; None if there is no value."""


@dataclass
class FetchedBatches:
    """Counts for the micro-batches that the engine has fetched in one optimizer step: their number, the seconds of
    waiting for them, and the number of their padding tokens."""

    taken: int = 0
    wait_s: float = 0.0
    padding: Counter[str] = field(default_factory=Counter)  # number of padding tokens by kind of tokens


@dataclass
class LaunchedBlock:
    """Block of steps whose work has been launched but may not have finished."""

    read_seconds: ReadBlock
    fetched: list[FetchedBatches]  # one entry per step, also in losses and norms
    losses: list[Reading]
    norms: list[Reading]
    skipped: list[int]  # numbers of steps without an update, counted from this process's first step
    together: bool  # True if all ranks began the block at the same time


@dataclass
class Series:
    """All steps of a run in order, warm-up included. It has the time of each step, and for every rank the values of all
    columns, such as loss and gradient norm."""

    kinds: tuple[str, ...]  # kinds of tokens; the padding of each kind has a column
    loss_ranks: tuple[int, ...] | None = None  # ranks with a loss; None: all
    ranks: list[torch.Tensor] = field(default_factory=list)  # per step: (ranks, columns)
    times: StepTimes = field(default_factory=StepTimes)
    window_start: int | None = None  # first step of the window; None before the window
    stopped: str = ""
    skipped: list[int] = field(default_factory=list)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that are recorded for each step and rank."""
        return "step_s", "data_wait_s", "loss", "gradient_norm", *(f"{kind}_padding" for kind in self.kinds)

    def column(self, name: str) -> torch.Tensor:
        """Return the values of the column `name` (such as loss, see `columns`) with shape (steps, ranks), float64; NaN
        for a rank that has no value."""
        stacked = torch.stack(self.ranks) if self.ranks else torch.zeros(0, 1, len(self.columns))
        return stacked[:, :, self.columns.index(name)]

    @property
    def losses(self) -> torch.Tensor:
        """Losses with shape (steps, ranks with a loss)."""
        losses = self.column("loss")
        return losses if self.loss_ranks is None else losses[:, list(self.loss_ranks)]

    @property
    def step_s(self) -> list[float]:
        """Seconds of each step. A step lasts from the time when the slowest rank completed the previous step to the
        time when the slowest rank completed this step."""
        return self.times.step_s

    def append(self, ranks: list[torch.Tensor], skipped: list[int], *, together: bool) -> None:
        """Append the steps of a block. `ranks` has one tensor (ranks, columns) per step.

        `skipped` are the numbers of the steps without an update, because their gradients were not finite. If `together`
        is true, all ranks began the block at the same time, after a barrier. Otherwise each rank began the block right
        after its previous block, without waiting for the other ranks.
        """
        self.ranks.extend(ranks)
        own_s = torch.stack(ranks)[:, :, self.columns.index("step_s")]  # (steps, ranks)
        self.times.append(own_s.numpy(), together=together)
        self.skipped.extend(skipped)

    def is_finite(self, since: int) -> bool:
        """Return True if all losses and all reported gradient norms are finite in step number `since` and all later
        steps."""
        if since >= len(self.ranks):
            return True
        latest = Series(self.kinds, self.loss_ranks, self.ranks[since:])
        # In the column of norms, NaN means that the engine reports no norm. A norm that is not finite is stored as inf.
        return bool(latest.losses.isfinite().all()) and not bool(latest.column("gradient_norm").isinf().any())

    @property
    def warmup(self) -> int:
        """Number of warm-up steps. If no window has begun, all steps are warm-up steps."""
        return len(self.ranks) if self.window_start is None else self.window_start

    @property
    def window_s(self) -> float:
        """Sum of the step times in the window, in seconds. The time between blocks is excluded."""
        return sum(self.step_s[self.warmup :])


class Trainer:
    """Training loop of one rank: it fetches batches, makes steps and times them. Results are gathered between blocks,
    outside of the timed steps."""

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
        """Create the loop of a rank.

        `hook` is called at the beginning of each phase, with the phase (`fetch` or `steps`) and the step number.
        `before_step` is called with the step number before each step. `first` is the number of the first step; it is
        not 0 in a resumed training. `has_loss` is false on a rank whose engine returns no loss.
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
        """Make one optimizer step, including the fetch and copy of its micro-batches.

        Return the loss, possibly still being computed on the device, and the waiting time and padding of the
        micro-batches. The loss is None on a rank without a loss.
        """
        fetched = FetchedBatches()
        self._before_step(self._steps)
        # Called before the first fetch, because a pipeline rank may first wait for its neighbours.
        self._hook("steps", self._steps)
        loss = self._engine.train_step(self._fetch_micro_batches(fetched))
        if fetched.taken != self._spec.accumulation:  # otherwise the step would be too fast for its samples
            taken = f"took {fetched.taken} of {self._spec.accumulation} micro-batches of step {self._steps}"
            raise Refused(f"engine.backend={self._spec.engine.backend}: train_step {taken}; it must take all of them")
        if (loss is not None) != self._has_loss:
            returned, expected = ("no loss", "has one") if self._has_loss else ("a loss", "has none")
            raise Refused(f"train_step returned {returned} on a rank that by its engine's facts {expected}")
        self._steps += 1
        return loss, fetched

    def _fetch_micro_batches(self, fetched: FetchedBatches) -> Iterator[dict[str, torch.Tensor]]:
        """Yield the micro-batches of an optimizer step. Each is fetched when the engine requests it."""
        for _ in range(self._spec.accumulation):
            begin = time.perf_counter()
            self._hook("fetch", self._steps)
            batch = next(self._batches)
            fetched.taken += 1
            fetched.wait_s += time.perf_counter() - begin
            fetched.padding.update(batch.padding)
            self._hook("steps", self._steps)
            yield self._copy(batch.tensors)

    def block(self, steps: int, series: Series) -> None:
        """Run and time a block of steps, and append finished blocks to `series`.

        On a CPU the block is appended when it ends. On a GPU it is appended during the next call, while the next block
        runs.
        """
        # A block begins with a barrier only if no earlier block is still running. Otherwise it follows the previous
        # block without waiting.
        together = not self._launched
        if together:
            self.peers.barrier()
            self._clock.drain()
        self._launched.append(self._launch(steps, together))
        while len(self._launched) > self._clock.blocks_ahead:
            self._gather(self._launched.popleft(), series)

    def finish(self, series: Series) -> None:
        """Wait until all launched blocks have finished, and append them to `series`."""
        while self._launched:
            self._gather(self._launched.popleft(), series)

    @property
    def steps_under_way(self) -> int:
        """Number of launched steps that have not been appended to a series yet."""
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
        # In a rehearsal only one rank is real, so losses and norms lack the contributions of the other ranks.
        if not self.peers.are_real:
            losses, norms = [math.nan] * steps, [None] * steps
        # The copies must be launched before the block ends, because reading the times waits only for the end of the
        # block.
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
    """Run the warm-up and then the measurement window, as set by the protocol, and fill `series`.

    `open_window` is called once between warm-up and window. `after_block` is called after every block of the window.
    Neither call is timed. With `limit_s`, the window also ends as soon as the whole confidence interval of the step
    time lies above this number of seconds. A step belongs to the part (warm-up or window) in which it was launched,
    even if the step ends later.
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
    """Return the number of steps of the next block. Between two blocks, rank 0 decides whether to continue.

    `lacking` is the number of steps that the warm-up or the window still needs to reach its minimum number of steps. If
    `lacking` is positive, the block has at most this number of steps. If `lacking` is 0 or negative, only more time is
    needed, and the block has its full length.
    """
    return min(protocol.block_steps, lacking) if lacking > 0 else protocol.block_steps


def _send_to_host(values: list[Reading]) -> list[Reading]:
    """Return the values, with each device tensor replaced by a copy on the host.

    The copies go to page-locked memory and may still be in progress on return.
    """
    return [
        value.detach().to("cpu", non_blocking=True) if isinstance(value, torch.Tensor) else value for value in values
    ]
