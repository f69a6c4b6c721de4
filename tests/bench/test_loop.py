"""The measured loop by hand: scripted clocks of two ranks, data and losses in place of a model's."""

import io
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pyarrow.parquet as pq
import pytest
import torch

from bench.data import MicroBatch
from bench.measure import observe
from bench.measure.failures import Refused
from bench.measure.loop import Series, Trainer, run
from bench.spec import RunSpec

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
            "warmup_steps": 2,
            "warmup_max_steps": 4,
            "block_steps": 2,
            "min_steps": 3,
            "max_steps": 3,
        },
    }
    return RunSpec.model_validate(plain | changed)


class Scripted:
    """A clock and an engine: rank 0's seconds and losses, step by step."""

    def __init__(self, seconds: Iterable[float], losses: Iterable[float] = itertools.repeat(1.0)) -> None:
        self._seconds, self._losses = iter(seconds), iter(losses)

    def begin(self) -> None:
        self._marks = 0

    def mark(self) -> None:
        self._marks += 1

    def end(self) -> list[float]:
        return list(itertools.islice(self._seconds, self._marks))

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
    """Rank 0's view of two ranks; the other one's seconds are scripted, the rest is the same on both."""

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


def trained(scripted: Scripted, others: Sequence[float], spec: RunSpec | None = None) -> Series:
    spec, series = spec or a_spec(), Series(("encoder", "decoder"))
    trainer = Trainer(spec, scripted, batches(), scripted, CPU, lambda phase, step: None, TwoRanks(others))
    run(trainer, spec, lambda: None, series)
    return series


def in_window(series: Series) -> list[bool]:
    column: list[bool] = pq.read_table(io.BytesIO(observe.write_steps_table(series)))["window"].to_pylist()
    return column[::2]  # both ranks' rows are alike


def test_the_steps_of_a_window_add_up_to_its_seconds() -> None:
    """Warm-up of two blocks; a window of two steps that end at 2 and 4 on the slowest rank, and one of 3."""
    steps = observe.reduce_steps(trained(Scripted([5, 1, 1, 1, 1, 3, 3]), [1, 5, 1, 1, 2, 1, 1]))
    assert (steps.cut, steps.stopped) == (4, "steps")
    assert steps.step_s == (5, 1, 1, 1, 2, 2, 3)
    assert steps.slowest_rank_s == (5, 5, 1, 1, 2, 3, 3), "which do not add up"
    assert steps.fastest_rank_s == (1, 1, 1, 1, 1, 1, 1)
    assert steps.window_s == sum(steps.step_s[4:]) == 7


def test_only_steps_of_a_window_are_in_it() -> None:
    series = trained(Scripted([1] * 7), [1] * 7)
    assert in_window(series) == [False] * 4 + [True] * 3


def test_a_run_that_ends_in_its_warm_up_has_no_step_in_a_window() -> None:
    """Neither where the loss is lost nor where somebody interrupts it."""
    series = trained(Scripted([1] * 7, [1.0, math.nan]), [1] * 7)
    steps = observe.reduce_steps(series)
    assert (series.stopped, steps.cut, steps.window_s) == ("invalid", 2, 0.0)
    assert in_window(series) == [False, False]
    series.stopped = ""
    assert in_window(series) == [False, False]


def test_a_run_whose_loss_is_lost_in_its_window_keeps_its_cut() -> None:
    series = trained(Scripted([1] * 7, [1.0] * 5 + [math.nan] * 2), [1] * 7)
    assert (series.stopped, observe.reduce_steps(series).cut) == ("invalid", 4)
    assert in_window(series) == [False] * 4 + [True] * 2


class WithoutLoss(Scripted):
    """An engine on a rank that has no loss: the first of two stages of a pipeline, say."""

    def train_step(self, micro_batches: Iterable[dict[str, torch.Tensor]]) -> None:
        super().train_step(micro_batches)


class OneLoss(TwoRanks):
    """Rank 0's view of two ranks of which only the other one has a loss, 3.0."""

    def all_gather(self, rows: torch.Tensor) -> list[torch.Tensor]:
        gathered = super().all_gather(rows)
        for ranks in gathered:
            ranks[1, 2] = 3.0
        return gathered


def test_the_loss_of_a_step_is_that_of_the_ranks_that_have_one() -> None:
    engine, series = WithoutLoss([1.0] * 7), Series(("encoder", "decoder"), loss_ranks=(1,))
    peers = OneLoss([1.0] * 7)
    trainer = Trainer(a_spec(), engine, batches(), engine, CPU, lambda *at: None, peers, has_loss=False)
    run(trainer, a_spec(), lambda: None, series)
    assert observe.build_outcome(series).kind == "ok"
    assert observe.reduce_steps(series).loss == (3.0,) * 7
    table = pq.read_table(io.BytesIO(observe.write_steps_table(series)))
    assert [math.isnan(loss) for loss in table["loss"].to_pylist()] == [True, False] * 7


@pytest.mark.parametrize(
    ("engine", "has_loss", "told"),
    [(WithoutLoss([1.0]), True, "no loss on a rank that by its engine's facts has one"),
     (Scripted([1.0]), False, "a loss on a rank that by its engine's facts has none")],
)  # fmt: skip
def test_a_loss_that_is_not_where_the_facts_say_is_refused(engine: Scripted, has_loss: bool, told: str) -> None:
    trainer = Trainer(a_spec(), engine, batches(), engine, CPU, lambda *at: None, TwoRanks([]), has_loss=has_loss)
    with pytest.raises(Refused, match=told):
        trainer.step()


class Stepwise(Scripted):
    """An engine that notes how many micro-batches were fetched by the time it computes with each."""

    def __init__(self, fetched: list[int]) -> None:
        super().__init__(itertools.repeat(1.0))
        self._fetched = fetched
        self.seen: list[int] = []

    def train_step(self, micro_batches: Iterable[dict[str, torch.Tensor]]) -> torch.Tensor:
        for _ in micro_batches:
            self.seen.append(len(self._fetched))
        return torch.tensor(1.0)


def test_a_micro_batch_is_fetched_when_the_one_before_it_was_computed_with() -> None:
    """A loader has all the time of a micro-step for the next one: asked for all at once it would have to hurry."""
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
    assert phases[:6] == [("fetch", 0), ("steps", 0)] * 3
    assert series.column("encoder_padding")[:, 0].tolist() == [6, 6]
    assert series.column("decoder_padding")[:, 0].tolist() == [3, 3]
    assert (series.column("data_wait_s") >= 3 * 0.005).all(), "the waits of a step's micro-batches are added up"
