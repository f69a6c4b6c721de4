"""The measured loop: warm-up, window, and what every rank saw of each step.

Both lengths are fixed before the run. An end that looks at the data biases the mean by which everything is ranked: a
window that met a stall would be prolonged and diluted, one that met none would not.

Rank 0 asks between blocks of steps and tells the others; a decision per rank would leave some waiting for ever.

The copy of a micro-batch beside the compute stream follows torch's notes on CUDA semantics, and was not tried on a GPU
yet.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from bench.core.spec import MeasureSpec, RunSpec
from bench.core.statistics import series_interval
from bench.core.steps import StepTimes
from bench.data import MicroBatch
from bench.engines import Engine
from bench.measure.clock import Clock, ReadBlock
from bench.measure.failures import Refused
from bench.measure.peers import Peers


class BatchCopy(Protocol):
    """Brings micro-batches to a device."""

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the tensors on the device, ready for what is launched next."""
        ...


class StreamCopy:
    """Copies on the stream that computes. From pageable memory the driver first takes a copy of its own, and may wait
    for the stream (CUDA driver API, "API synchronization behavior"): then the host cannot run ahead."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(self._device, non_blocking=True) for name, tensor in tensors.items()}


class SideStreamCopy:
    """Copies from page-locked memory on a stream of its own, while the device computes what it was given before; only
    what is launched next waits for the copy. The allocator is told that the computing stream uses the tensors too,
    since it would else give their memory to the next copy while they are read."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            copied = {name: self._copy(tensor) for name, tensor in tensors.items()}
        computing.wait_stream(self._stream)  # the device does; the host goes on
        for tensor in copied.values():
            tensor.record_stream(computing)
        return copied

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on its way to the device. Its page-locked memory is not given away before it has left it: the
        allocator of such memory notes the copy."""
        pinned = tensor if tensor.is_pinned() else tensor.pin_memory()
        return pinned.to(self._device, non_blocking=True)


def create_batch_copy(device: torch.device, *, pinned: bool) -> BatchCopy:
    """Return the way to `device` of batches that the spec wants `pinned`, which on a CPU says nothing."""
    return SideStreamCopy(device) if device.type == "cuda" and pinned else StreamCopy(device)


WindowEnd = Literal["window", "time", "slower"]
_SLOWER_LEVEL = 0.998  # of the interval by which a trial is ended: it is looked at after every block


def is_warmup_done(steps: int, elapsed_s: float, protocol: MeasureSpec, *, on_gpu: bool) -> bool:
    """Whether the warm-up has its steps and, on a GPU, its seconds: under load a GPU's clock settles with its
    temperature, in half a minute and more."""
    return steps >= protocol.warmup_steps and (not on_gpu or elapsed_s >= protocol.gpu_warmup_s)


def is_slower(step_s: Sequence[float], than_s: float, block: int) -> bool:
    """Whether steps take surely longer than `than_s`. It is asked after every block, so each answer has to be surer
    than an interval that is looked at once; the first comes after two blocks."""
    interval = series_interval(step_s, _SLOWER_LEVEL) if len(step_s) >= 2 * block else None
    return interval is not None and interval[0] > than_s


def find_stop_reason(steps: int, elapsed_s: float, protocol: MeasureSpec) -> WindowEnd | None:
    """Return why the window ends now, or None.

    `steps` are those of the window, launched ones included, `elapsed_s` its seconds so far. A window has at least the
    protocol's seconds and steps; where steps are too long for that, it ends at the most seconds that it may take.
    """
    if elapsed_s >= protocol.window_s and steps >= protocol.min_steps:
        return "window"
    return "time" if elapsed_s >= protocol.max_s else None


Reading = torch.Tensor | float | None
"""A loss or a norm of one step, perhaps still on its way from the device."""


@dataclass
class FetchedBatches:
    """What the micro-batches of one optimizer step took and held."""

    wait_s: float = 0.0  # until they were there
    padding: Counter[str] = field(default_factory=Counter)  # by kind of tokens


@dataclass
class LaunchedBlock:
    """Steps whose work has been given to the device, which may not have done it yet."""

    read_seconds: ReadBlock
    fetched: list[FetchedBatches]  # by step, like the rest
    losses: list[Reading]
    norms: list[Reading]
    skipped: list[int]  # steps, counted from the first that was made here
    together: bool  # all ranks began it together


@dataclass
class Series:
    """The steps in order, warm-up included: per step its columns, and every rank's own."""

    kinds: tuple[str, ...]  # of tokens, each with a column of its padding
    loss_ranks: tuple[int, ...] | None = None  # which have a loss; None: all
    # one (ranks, columns) tensor per step
    ranks: list[torch.Tensor] = field(default_factory=list)
    times: StepTimes = field(default_factory=StepTimes)
    cut: int | None = None  # first step of the window; None before there is one
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
        return self.times.step_s

    def append(self, ranks: list[torch.Tensor], skipped: list[int], *, together: bool) -> None:
        """Add the steps of a block, which all ranks began `together` or behind the one before."""
        self.ranks.extend(ranks)
        own_s = torch.stack(ranks)[:, :, self.columns.index("step_s")]
        self.times.append(own_s.numpy(), together=together)
        self.skipped.extend(skipped)

    def is_finite(self, since: int) -> bool:
        """Whether every loss, and every gradient norm that was told, is a finite number in the steps from `since`."""
        if since >= len(self.ranks):
            return True
        latest = Series(self.kinds, self.loss_ranks, self.ranks[since:])
        return bool(latest.losses.isfinite().all()) and not bool(latest.column("gradient_norm").isinf().any())

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
        first: int = 0,
        before_step: Callable[[int], None] = lambda step: None,
    ) -> None:
        """`first` is the number of the first step that is made; `before_step` hears each one's."""
        self.peers = peers
        self._spec, self._engine, self._batches = spec, engine, batches
        self._clock, self._device, self._hook = clock, device, hook
        self._copy = create_batch_copy(device, pinned=spec.data.pin_memory)
        self._has_loss = has_loss
        self._steps = self._first = first
        self._before_step = before_step
        self._under_way: deque[LaunchedBlock] = deque()

    @property
    def on_gpu(self) -> bool:
        return self._device.type == "cuda"

    def step(self) -> tuple[torch.Tensor | None, FetchedBatches]:
        """Make one optimizer step, its data's fetch and copy to the device included; return the loss, unsynchronised,
        None on a rank without one, and what was fetched."""
        fetched = FetchedBatches()
        self._before_step(self._steps)
        self._hook("steps", self._steps)  # before its first micro-batch a rank of a pipeline waits for its neighbours
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
            yield self._copy(batch.tensors)

    def block(self, steps: int, series: Series) -> None:
        """Run and time `steps` steps. What every rank saw of them is gathered and appended to `series` when so many
        blocks are under way as the clock wants to be ahead: on a CPU at once, on a device while the next one runs."""
        together = not self._under_way
        if together:
            self.peers.barrier()
            self._clock.drain()
        self._under_way.append(self._launch(steps, together))
        while len(self._under_way) > self._clock.blocks_ahead:
            self._gather(self._under_way.popleft(), series)

    def finish(self, series: Series) -> None:
        """Wait for the blocks that are under way."""
        while self._under_way:
            self._gather(self._under_way.popleft(), series)

    @property
    def steps_under_way(self) -> int:
        """Steps that are launched, and not in any series yet."""
        return sum(len(block.fetched) for block in self._under_way)

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
                # Looking for a loss scale, fp16 overflows now and then; elsewhere gradients that are not finite
                # are the end of the training.
                norms[-1] = None if self._spec.precision == "fp16" else math.inf
        if not self.peers.are_real:  # what others would have sent is missing in both
            losses, norms = [math.nan] * steps, [None] * steps
        losses, norms = _send_to_host(losses), _send_to_host(norms)  # before the block ends: its end is waited for
        return LaunchedBlock(clock.end(), data, losses, norms, found, together)

    def _gather(self, block: LaunchedBlock, series: Series) -> None:
        seconds = block.read_seconds()
        rows = [
            (
                second,
                fetched.wait_s,
                _convert_loss(loss),
                _convert_norm(norm),
                *(fetched.padding[kind] for kind in series.kinds),
            )
            for second, fetched, loss, norm in zip(seconds, block.fetched, block.losses, block.norms, strict=True)
        ]
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

    `open_window` is called once in between, `after_block` after every block of the window, both off the clock.
    The window ends too once steps surely take longer than `limit_s`.
    What is under way when a decision falls belongs to the warm-up, or to the window.
    """
    peers, checked = trainer.peers, 0

    def is_sound() -> bool:
        nonlocal checked
        since, checked = checked, len(series.ranks)
        return not peers.are_real or series.is_finite(since)

    while True:
        launched = len(series.ranks) + trainer.steps_under_way
        trainer.block(_count_block_steps(protocol, protocol.warmup_steps - launched), series)
        if not is_sound():
            series.stopped = "invalid"
            return
        done = is_warmup_done(len(series.ranks), sum(series.step_s), protocol, on_gpu=trainer.on_gpu)
        if peers.broadcast(done):
            break
    trainer.finish(series)
    if not is_sound():
        series.stopped = "invalid"
        return
    series.cut = len(series.ranks)
    open_window()
    while not series.stopped:
        launched = len(series.ranks) - series.warmup + trainer.steps_under_way
        trainer.block(_count_block_steps(protocol, protocol.min_steps - launched), series)
        after_block()
        if not is_sound():
            reason = "invalid"
        elif limit_s is not None and is_slower(series.step_s[series.warmup :], limit_s, protocol.block_steps):
            reason = "slower"
        else:
            steps = len(series.ranks) - series.warmup + trainer.steps_under_way
            reason = find_stop_reason(steps, series.window_s, protocol) or ""
        series.stopped = peers.broadcast(reason)
    trainer.finish(series)
    if not is_sound():
        series.stopped = "invalid"


def _count_block_steps(protocol: MeasureSpec, lacking: int) -> int:
    """Return the steps of the next block: no more than are lacking; a whole block where only seconds are."""
    return min(protocol.block_steps, lacking) if lacking > 0 else protocol.block_steps


def _send_to_host(values: list[Reading]) -> list[Reading]:
    """Return values, those on a device on their way to page-locked memory, without waiting for them."""
    return [
        value.detach().to("cpu", non_blocking=True) if isinstance(value, torch.Tensor) else value for value in values
    ]


def _convert_loss(loss: Reading) -> float:
    """Return a loss as a float: NaN where the rank has none."""
    return math.nan if loss is None else float(loss)


def _convert_norm(norm: Reading) -> float:
    """Return a gradient norm as a float: NaN where the engine tells none, infinity where it was not finite."""
    value = math.nan if norm is None else float(norm)
    return math.inf if norm is not None and math.isnan(value) else value
