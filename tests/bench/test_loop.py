"""Tests of the training loop that measures step times. The step times of two ranks, the data and the losses are given,
and results are compared with hand calculations."""

import io
import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pyarrow.parquet as pq
import pytest
import torch

from bench.core.spec import RunSpec
from bench.core.steps import StepTimes
from bench.data import MicroBatch
from bench.measure import observe
from bench.measure.clock import DeviceClock
from bench.measure.failures import Refused
from bench.measure.loop import Series, Trainer, run

T = TypeVar("T")
CPU = torch.device("cpu")


def a_spec(**changed: Any) -> RunSpec:
    plain = {
        "model": {"name": "tiny", "family": "t5", "shape": {}},
        "engine": {"name": "ddp", "backend": "ddp"},
        "data": {"name": "synthetic", "source": "synthetic"},
        "batch": {"micro": 1, "accumulation": 1},
        "devices_per_node": 2,
        "measure": {
            "warmup_steps": 4,
            "block_steps": 2,
            "min_steps": 3,
            "window_s": 0,
            "gpu_warmup_s": 0,
        },
    }
    return RunSpec.model_validate(plain | changed)


class Scripted:
    """Simulated engine that is also the clock of rank 0. Each step takes the next of the given numbers of seconds, and
    returns the next of the given losses."""

    def __init__(self, seconds: Iterable[float], losses: Iterable[float] = itertools.repeat(1.0)) -> None:
        self._seconds, self._losses = iter(seconds), iter(losses)

    blocks_ahead = 0

    def drain(self) -> None:
        pass

    def begin(self) -> None:
        self._marks = 0

    def mark(self) -> None:
        self._marks += 1

    def end(self) -> Callable[[], list[float]]:
        seconds = list(itertools.islice(self._seconds, self._marks))
        return lambda: seconds

    def train_step(self, micro_batches: Iterable[dict[str, torch.Tensor]]) -> torch.Tensor:
        self.taken = list(micro_batches)
        return torch.tensor(next(self._losses))

    def gradient_norm(self) -> float:
        return 1.0

    def skipped_steps(self) -> int:
        return 0

    def config(self) -> dict[str, Any]:
        return {}


class TwoRanks:
    """Communication of rank 0 with one other rank. The seconds of the other rank's steps are given. All other values
    that the other rank communicates equal those of rank 0."""

    are_real = True
    is_main = True

    def __init__(self, others_seconds: Sequence[float]) -> None:
        self._seconds = iter(others_seconds)

    def barrier(self) -> None:
        pass

    def gather(self, value: T) -> list[T]:
        return [value, value]

    def all_gather(self, rows: torch.Tensor) -> list[torch.Tensor]:
        others = rows.clone()
        others[:, 0] = torch.tensor(list(itertools.islice(self._seconds, len(rows))))
        return list(torch.stack([rows, others], dim=1))

    def broadcast(self, decision: T) -> T:
        return decision


def batches() -> Iterator[MicroBatch]:
    return itertools.repeat(
        MicroBatch({"input_ids": torch.ones(1, 4, dtype=torch.int64)}, {"encoder": 0, "decoder": 0})
    )


def trained(
    scripted: Scripted, others: Sequence[float], spec: RunSpec | None = None, limit_s: float | None = None
) -> Series:
    spec, series = spec or a_spec(), Series(("encoder", "decoder"))
    trainer = Trainer(spec, scripted, batches(), scripted, CPU, lambda phase, step: None, TwoRanks(others))
    run(trainer, spec.measure, lambda: None, series, limit_s=limit_s)
    return series


def in_window(series: Series) -> list[bool]:
    column: list[bool] = pq.read_table(io.BytesIO(observe.write_steps_table(series)))["window"].to_pylist()
    return column[::2]  # both ranks' rows are alike


def test_step_times_of_a_window_add_up_to_its_duration() -> None:
    """The warm-up has two blocks of two steps. The window has a block of two steps and a block of one step. A step of
    the window ends when its slowest rank has completed it.

    The two steps of the window's first block end 2 s and 4 s after the block's start. The step of the second block
    takes 3 s.
    """
    steps = observe.reduce_steps(trained(Scripted([5, 1, 1, 1, 1, 3, 3]), [1, 5, 1, 1, 2, 1, 1]))
    assert (steps.cut, steps.stopped) == (4, "window")
    assert steps.step_s == (5, 1, 1, 1, 2, 2, 3)
    assert steps.slowest_rank_s == (5, 5, 1, 1, 2, 3, 3), "which do not add up"
    assert steps.fastest_rank_s == (1, 1, 1, 1, 1, 1, 1)
    assert steps.window_s == sum(steps.step_s[4:]) == 7


@pytest.mark.parametrize(("limit_s", "stopped"), [(None, "window"), (3.5, "window"), (2.5, "slower")])
def test_window_ends_once_steps_certainly_exceed_their_limit(limit_s: float | None, stopped: str) -> None:
    spec = a_spec(measure={"warmup_steps": 4, "block_steps": 2, "min_steps": 30, "window_s": 0})
    steps = [3 + 0.01 * (number % 3) for number in range(60)]
    series = trained(Scripted(steps), [1.0] * 60, spec, limit_s)
    assert series.stopped == stopped
    assert (len(series.ranks) - series.warmup < 30) is (stopped == "slower")


def test_window_has_only_its_own_steps() -> None:
    series = trained(Scripted([1] * 7), [1] * 7)
    assert in_window(series) == [False] * 4 + [True] * 3


def test_run_that_ends_in_its_warm_up_has_an_empty_window() -> None:
    """Two reasons for the end are tested: a loss that is not finite, and an interruption."""
    series = trained(Scripted([1] * 7, [1.0, math.nan]), [1] * 7)
    steps = observe.reduce_steps(series)
    assert (series.stopped, steps.cut, steps.window_s) == ("invalid", 2, 0.0)
    assert in_window(series) == [False, False]
    series.stopped = ""
    assert in_window(series) == [False, False]


def test_run_with_an_invalid_loss_in_its_window_keeps_its_warm_up() -> None:
    series = trained(Scripted([1] * 7, [1.0] * 5 + [math.nan] * 2), [1] * 7)
    assert (series.stopped, observe.reduce_steps(series).cut) == ("invalid", 4)
    assert in_window(series) == [False] * 4 + [True] * 2


class WithoutLoss(Scripted):
    """Engine of a rank that computes no loss, such as the rank with the first of two pipeline stages."""

    def train_step(self, micro_batches: Iterable[dict[str, torch.Tensor]]) -> None:
        super().train_step(micro_batches)


class OneLoss(TwoRanks):
    """Communication of rank 0 with one other rank. Rank 0 has no loss, and the other rank has a loss of 3.0 in every
    step."""

    def all_gather(self, rows: torch.Tensor) -> list[torch.Tensor]:
        gathered = super().all_gather(rows)
        for ranks in gathered:
            ranks[1, 2] = 3.0
        return gathered


def test_loss_of_a_step_is_that_of_the_ranks_with_a_loss() -> None:
    engine, series = WithoutLoss([1.0] * 7), Series(("encoder", "decoder"), loss_ranks=(1,))
    peers = OneLoss([1.0] * 7)
    trainer = Trainer(a_spec(), engine, batches(), engine, CPU, lambda *at: None, peers, has_loss=False)
    run(trainer, a_spec().measure, lambda: None, series)
    assert observe.build_outcome(series).kind == "ok"
    assert observe.reduce_steps(series).loss == (3.0,) * 7
    table = pq.read_table(io.BytesIO(observe.write_steps_table(series)))
    assert [math.isnan(loss) for loss in table["loss"].to_pylist()] == [True, False] * 7


@pytest.mark.parametrize(
    ("engine", "has_loss", "expected"),
    [(WithoutLoss([1.0]), True, "no loss on a rank that by its engine's facts has one"),
     (Scripted([1.0]), False, "a loss on a rank that by its engine's facts has none")],
)  # fmt: skip
def test_loss_on_other_ranks_than_declared_is_refused(engine: Scripted, has_loss: bool, expected: str) -> None:
    trainer = Trainer(a_spec(), engine, batches(), engine, CPU, lambda *at: None, TwoRanks([]), has_loss=has_loss)
    with pytest.raises(Refused, match=expected):
        trainer.step()


class Hasty(Scripted):
    """Engine that takes all micro-batches of its first step, and only the first micro-batch of later steps."""

    taken: list[dict[str, torch.Tensor]] | None = None

    def train_step(self, micro_batches: Iterable[dict[str, torch.Tensor]]) -> torch.Tensor:
        return super().train_step(micro_batches if self.taken is None else itertools.islice(micro_batches, 1))


def test_step_without_some_of_its_micro_batches_is_refused() -> None:
    spec = a_spec(batch={"micro": 1, "accumulation": 2})
    engine = Hasty([1.0] * 2)
    trainer = Trainer(spec, engine, batches(), engine, CPU, lambda *at: None, TwoRanks([]))
    trainer.step()
    with pytest.raises(
        Refused, match=f"backend={spec.engine.backend}: train_step took 1 of 2 micro-batches of step 1;"
    ):
        trainer.step()


class Stepwise(Scripted):
    """Engine that stores a number whenever it receives a micro-batch: how many micro-batches have been fetched from the
    data loader so far."""

    def __init__(self, fetched: list[int]) -> None:
        super().__init__(itertools.repeat(1.0))
        self._fetched = fetched
        self.seen: list[int] = []

    def train_step(self, micro_batches: Iterable[dict[str, torch.Tensor]]) -> torch.Tensor:
        for _ in micro_batches:
            self.seen.append(len(self._fetched))
        return torch.tensor(1.0)


def test_micro_batch_is_fetched_after_the_previous_one_was_computed() -> None:
    """A micro-batch is fetched from the data loader only after the engine has computed the previous micro-batch. While
    the engine computes, the data loader can prepare the next micro-batch."""
    fetched: list[int] = []

    def loaded() -> Iterator[MicroBatch]:
        while True:
            time.sleep(0.005)
            fetched.append(len(fetched))
            yield MicroBatch({"input_ids": torch.ones(1, 4, dtype=torch.int64)}, {"encoder": 2, "decoder": 1})

    spec = a_spec(batch={"micro": 1, "accumulation": 3})
    engine, series, phases = Stepwise(fetched), Series(("encoder", "decoder")), list[tuple[str, int]]()
    trainer = Trainer(spec, engine, loaded(), engine, CPU, lambda *at: phases.append(at), TwoRanks([1.0] * 2))
    trainer.block(2, series)
    assert engine.seen == [1, 2, 3, 4, 5, 6]
    assert phases[:7] == [("steps", 0), *[("fetch", 0), ("steps", 0)] * 3]
    assert series.column("encoder_padding")[:, 0].tolist() == [6, 6]
    assert series.column("decoder_padding")[:, 0].tolist() == [3, 3]
    assert (series.column("data_wait_s") >= 3 * 0.005).all(), "the waits of a step's micro-batches are added up"


class Device:
    """Simulated device that executes steps from a queue, together with the clock of its simulated host.

    `launch_s` is the time that the host needs to put a step into the queue. `step_s` is the time that the device needs
    to execute it. `between_s` is the time that the host needs for the harness's work between two blocks of steps.
    """

    def __init__(self, step_s: float, launch_s: float, between_s: float = 0.0) -> None:
        self.step_s, self.launch_s, self.between_s = step_s, launch_s, between_s
        self.host_s = self.free_s = 0.0  # host's current time, and end of the device's queued work
        self.idle_s = 0.0  # seconds in which the device was idle since its first step
        self.waits: list[tuple[float, float]] = []  # (time when the host began to wait for an event, time of the event)
        self.drained = 0

    def launch(self) -> None:
        self.host_s += self.launch_s
        if self.host_s > self.free_s and self.free_s:
            self.idle_s += self.host_s - self.free_s
        self.free_s = max(self.free_s, self.host_s) + self.step_s

    def drain(self) -> None:
        self.drained += 1
        self.host_s = max(self.host_s, self.free_s)


class PlaceInQueue:
    """Simulated CUDA event, with the interface of `torch.cuda.Event`. It marks a position in the queue of the simulated
    device."""

    def __init__(self, device: Device) -> None:
        self._device, self.at_s = device, 0.0

    def record(self) -> None:
        self.at_s = max(self._device.free_s, self._device.host_s)

    def synchronize(self) -> None:
        self._device.waits.append((self._device.host_s, self.at_s))
        self._device.host_s = max(self._device.host_s, self.at_s)

    def elapsed_time(self, later: Any) -> float:
        milliseconds: float = 1e3 * (later.at_s - self.at_s)
        return milliseconds


class OnDevice(Scripted):
    """Engine that puts each step into the queue of a simulated device, and does not wait for the end of the step."""

    def __init__(self, device: Device) -> None:
        super().__init__([])
        self._device = device

    def train_step(self, micro_batches: Iterable[dict[str, torch.Tensor]]) -> torch.Tensor:
        self._device.launch()
        return super().train_step(micro_batches)


class Alone(TwoRanks):
    """Communication of a run with a single rank. The harness works between two blocks of steps. To simulate this work,
    an all-gather advances the clock of the simulated host by `device.between_s` seconds."""

    def __init__(self, device: Device) -> None:
        super().__init__([])
        self._device = device

    def all_gather(self, rows: torch.Tensor) -> list[torch.Tensor]:
        self._device.host_s += self._device.between_s
        return list(rows.unsqueeze(1))


def timed_on(device: Device, ahead: int = 1, **measure: Any) -> Series:
    protocol = {"warmup_steps": 4, "gpu_warmup_s": 0, "block_steps": 2, "min_steps": 12, "window_s": 0}
    spec = a_spec(measure=protocol | measure, devices_per_node=1)
    clock, engine, series = DeviceClock(lambda: PlaceInQueue(device), device.drain), OnDevice(device), Series(())
    clock.blocks_ahead = ahead
    trainer = Trainer(spec, engine, batches(), clock, CPU, lambda *at: None, Alone(device))
    run(trainer, spec.measure, lambda: None, series)
    assert trainer.steps_under_way == 0
    return series


def test_device_slower_than_its_host_never_waits_for_the_harness() -> None:
    """The device executes a step in 100 ms, and the host launches it in 10 ms. The harness's work between two blocks
    takes 30 ms, while the device executes the next block.

    So the device is idle only once, when the window begins. In a second loop for comparison, the host waits for the
    device after each block. There, the device waits for the launch of each block's first step.
    """
    device = Device(step_s=0.1, launch_s=0.01, between_s=0.03)
    series = timed_on(device)
    assert device.drained == 2, "before the warm-up and before the window"
    (window, drained) = (series.step_s[series.warmup :], timed_on(Device(0.1, 0.01, 0.03), ahead=0))
    assert window == pytest.approx([0.11] + [0.1] * 11), "the first step is launched on an idle device"
    assert series.window_s == pytest.approx(sum(window))
    assert drained.step_s[drained.warmup :] == pytest.approx([0.11, 0.1] * 6)


def test_host_waits_for_the_event_of_the_previous_block() -> None:
    """A block has 2 steps of 100 ms. While the device runs block n, the host launches block n + 1. Only then does the
    host read the times of block n. So the device always has work, and the host waits only for the end of block n."""
    device = Device(step_s=0.1, launch_s=0.001)
    timed_on(device)
    in_window = device.waits[-6:]
    for began, came in in_window[:-1]:
        assert began < came, "the device has not come so far, so it has work"
    ends = [came for _, came in in_window]
    assert [later - earlier for earlier, later in itertools.pairwise(ends)] == pytest.approx([0.2] * 5)


def test_work_of_the_harness_between_blocks_is_not_timed() -> None:
    """The host launches a step in 50 ms, and the device executes it in 10 ms. So without the harness, a step takes 50
    ms.

    The harness's work between two blocks takes 30 ms of the host. It may lengthen the first step of a block by at most
    10 ms, the time of one step on the device.
    """
    series = timed_on(Device(step_s=0.01, launch_s=0.05, between_s=0.03))
    assert series.step_s[series.warmup + 1 :: 2] == pytest.approx([0.05] * 6)
    assert all(0.0499 < first < 0.0601 for first in series.step_s[series.warmup :: 2])


def test_window_on_a_device_has_no_surplus_steps() -> None:
    series = timed_on(Device(step_s=0.1, launch_s=0.01))
    assert (len(series.ranks) - series.warmup, series.stopped) == (12, "window")
    assert series.times.step_s == series.step_s and len(series.step_s) == len(series.ranks)


def test_block_in_progress_at_the_minimum_time_belongs_to_the_window() -> None:
    series = timed_on(Device(step_s=0.1, launch_s=0.01), window_s=0.75, min_steps=4)
    assert series.stopped == "window"
    assert len(series.ranks) - series.warmup == 10, "four blocks were seen, and one was under way"


def test_window_lasts_its_minimum_time_for_short_steps() -> None:
    """On a GPU, 500 steps of 5 ms take only 2.5 s, too short for the GPU's clock rate to settle. Therefore a window
    (the steps that are measured) has a minimum time in addition to its minimum number of steps."""
    quick = timed_on(Device(step_s=0.005, launch_s=0.001), min_steps=20, window_s=0.5)
    assert quick.stopped == "window" and 0.5 <= quick.window_s < 0.53
    assert len(quick.ranks) - quick.warmup >= 100


def test_window_with_long_steps_ends_at_its_time_limit() -> None:
    slow = timed_on(Device(step_s=1.0, launch_s=0.01), min_steps=30, max_s=9.0)
    assert slow.stopped == "time" and 9.0 <= slow.window_s < 14.1, "at most a block and the one under way more"


@pytest.mark.parametrize("stalled", [None, 8, 20])
def test_length_of_a_window_does_not_depend_on_its_step_times(stalled: int | None) -> None:
    """All steps take 1 s, except step number `stalled`, which takes 3 s. With the slow step, the window has fewer
    steps. It must last as many seconds as a window without a slow step."""
    spec = a_spec(measure={"warmup_steps": 4, "block_steps": 2, "min_steps": 6, "window_s": 40.0})
    seconds = [3.0 if number == stalled else 1.0 for number in range(60)]
    series = trained(Scripted(seconds), seconds, spec)
    assert (series.stopped, series.window_s) == ("window", 40.0 if stalled is None else pytest.approx(40.5, abs=0.6))


def test_invalid_loss_is_detected_one_block_later() -> None:
    device = Device(step_s=0.1, launch_s=0.01)
    engine, series = OnDevice(device), Series(())
    engine._losses = iter([1.0] * 12 + [math.nan] + [1.0] * 50)
    spec = a_spec(devices_per_node=1, measure=a_spec().measure.model_dump() | {"min_steps": 40})
    clock = DeviceClock(lambda: PlaceInQueue(device), device.drain)
    run(
        Trainer(spec, engine, batches(), clock, CPU, lambda *at: None, Alone(device)),
        spec.measure,
        lambda: None,
        series,
    )
    assert (series.stopped, observe.build_outcome(series).evidence["step"]) == ("invalid", 12)
    assert len(series.ranks) == 16, "of blocks of 2, that of steps 12 and 13 and the one behind it"


def test_steps_without_barriers_add_up_to_those_of_the_slowest_rank() -> None:
    """Two ranks run two blocks without a barrier between them. They complete the first block at 3 s and 4 s, and the
    second at 7 s and 6 s. Step times must add up to the 7 s of the slowest rank."""
    times = StepTimes()
    times.append([[1, 2], [2, 2]], together=True)
    times.append([[3, 1], [1, 1]], together=False)
    assert times.step_s == [2, 2, 2, 1]
    times.append([[1, 2]], together=True)
    assert times.step_s[-1] == 2
