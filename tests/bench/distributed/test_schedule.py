"""Tests of pipeline schedules. They are compared with torch's schedules and with closed forms. They are also executed
with blocking transfers, to show that they do not deadlock."""

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated_steps import SimulatedStep, count_passes_in_flight, simulate_schedule

from bench.engines.distributed.schedule import (
    Action,
    Order,
    PipelineSize,
    ScheduleName,
    add_gathers,
    add_transfers,
    build_computation,
    build_schedule,
    find_obstacle,
    find_source,
)

NAMES: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "interleaved", "breadth_first")
CASES = [
    (name, size)
    for name in NAMES
    for size in itertools.starmap(PipelineSize, itertools.product((1, 2, 3, 4, 8), (1, 2, 4), (1, 2, 4, 8, 16)))
    if find_obstacle(name, size) is None
]
FULL = [(name, size) for name, size in CASES if size.ranks > 1 and size.micro_batches % size.ranks == 0]
"""Cases with several ranks, in which the number of micro-batches is a multiple of the number of ranks."""


def simulate(name: ScheduleName, size: PipelineSize, hop_s: float = 0.0) -> SimulatedStep:
    """Simulate a step of a schedule. Each stage takes 1 s for a forward pass and 2 s for a backward pass. A transfer
    between ranks takes `hop_s` seconds."""
    return simulate_schedule(build_schedule(name, size), size, [1.0] * size.stages, [2.0] * size.stages, hop_s)


def bubble(step: SimulatedStep) -> float:
    """Return the idle seconds of rank 0 divided by its busy seconds. In the tests, all ranks are busy for the same
    time."""
    return (step.total_s - step.busy_s[0]) / step.busy_s[0]


# comparison with torch.distributed.pipelining


@pytest.fixture(scope="module")
def pipelining() -> Any:
    """Return torch's module of pipeline schedules. While the fixture is in use, there is a fake process group of one
    rank."""
    import torch.distributed as dist
    from torch.distributed.pipelining import schedules
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield schedules
    dist.destroy_process_group()


def order_of_torch(pipelining: Any, name: str, size: PipelineSize) -> list[list[tuple[str, int, int]]]:
    import torch
    from torch.distributed.pipelining import PipelineStage

    class Stage(PipelineStage):
        """Stage on the first rank of a pipeline. The other ranks exist only in a fake process group."""

        def __init__(self, index: int) -> None:
            layer, device = torch.nn.Linear(1, 1), torch.device("cpu")
            super().__init__(layer, index, size.stages, device, input_args=(), output_args=(torch.empty(1),))

    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size.ranks)
    stages = [Stage(index) for index in size.stages_of(0)]
    schedule = getattr(pipelining, name)
    given_stages = stages[0] if issubclass(schedule, pipelining.PipelineScheduleSingle) else stages
    made = schedule(given_stages, size.micro_batches, loss_fn=lambda *_: torch.zeros(()))
    kinds = {"FORWARD": "forward", "FULL_BACKWARD": "backward"}
    return [
        [
            (kinds[action.computation_type.name], action.stage_index, action.microbatch_index)
            for action in made.pipeline_order[rank]
            if action is not None and action.computation_type.name in kinds
        ]
        for rank in range(size.ranks)
    ]


@pytest.mark.parametrize(("torchs", "name", "size"), [
    *(("ScheduleGPipe", "gpipe", PipelineSize(ranks, 1, micro)) for ranks, micro in ((2, 4), (4, 8), (4, 2))),
    *(("ScheduleInterleaved1F1B", "interleaved", PipelineSize(ranks, stages, micro))
      for ranks, stages, micro in ((2, 2, 4), (4, 2, 8), (4, 4, 16), (3, 2, 9))),
    *(("ScheduleLoopedBFS", "breadth_first", PipelineSize(ranks, stages, micro))
      for ranks, stages, micro in ((2, 2, 4), (4, 2, 8), (4, 4, 2), (1, 6, 4), (3, 2, 5))),
])  # fmt: skip
def test_passes_of_all_ranks_have_the_order_of_torch(
    pipelining: Any, torchs: str, name: ScheduleName, size: PipelineSize
) -> None:
    ours = [[tuple(action) for action in order] for order in build_computation(name, size)]
    assert ours == order_of_torch(pipelining, torchs, size)


@pytest.mark.parametrize("size", [PipelineSize(2, 1, 4), PipelineSize(4, 1, 8), PipelineSize(3, 1, 5)])
def test_passes_of_the_first_rank_of_1f1b_have_the_order_of_torch(pipelining: Any, size: PipelineSize) -> None:
    # for later ranks, torch 2.13 prints forward passes with numbers from 1, but runs them with numbers from 0
    ours = [tuple(action) for action in build_computation("1f1b", size)[0]]
    assert ours == order_of_torch(pipelining, "Schedule1F1B", size)[0]


def test_1f1b_has_the_order_of_its_papers_figure() -> None:
    """The order is that of figure 3 in arXiv 2006.09503 for four workers, here with four micro-batches."""

    def read(text: str, rank: int) -> list[Action]:
        kinds = {"F": "forward", "B": "backward"}
        return [Action(kinds[word[0]], rank, int(word[1])) for word in text.split()]  # type: ignore[arg-type]

    drawn = [
        "F0 F1 F2 F3 B0 B1 B2 B3", "F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3",
    ]  # fmt: skip
    computed = build_computation("1f1b", PipelineSize(4, 1, 4))
    assert [list(order) for order in computed] == [read(text, rank) for rank, text in enumerate(drawn)]


# requirements of every schedule


def test_each_pass_is_computed_once_on_the_rank_of_its_stage() -> None:
    for name, size in CASES:
        for rank, order in enumerate(build_computation(name, size)):
            wanted = itertools.product(("forward", "backward"), size.stages_of(rank), range(size.micro_batches))
            assert Counter(order) == Counter(itertools.starmap(Action, wanted))


def test_schedules_have_no_deadlock_with_blocking_transfers() -> None:
    for name, size in CASES:
        run_with_rendezvous(build_schedule(name, size), size)


def run_with_rendezvous(schedule: tuple[Order, ...], size: PipelineSize) -> None:
    """Execute the actions of all ranks with blocking transfers, and fail if the ranks deadlock. Here, a send completes
    only when the receiving rank has reached the matching receive. Real communication libraries may complete a send
    earlier, so they deadlock in fewer cases."""
    left, here = [list(order[::-1]) for order in schedule], set[Action]()
    while any(left):
        moved = False
        for order in left:
            if not order:
                continue
            action = order[-1]
            if action.computes:
                source = find_source(action, size)
                if source is None or source in here:
                    here.add(order.pop())
                    moved = True
                continue
            peer = peer_of(action, size)
            if left[peer] and left[peer][-1] == counterpart(action):
                left[peer].pop()
                order.pop()
                moved = True
        assert moved, [order[-1] for order in left if order]


def counterpart(action: Action) -> Action:
    """Return the receive that matches a send, or the send that matches a receive."""
    direction, what = action.kind.split("_")
    other = f"{'receive' if direction == 'send' else 'send'}_{what}"
    towards_the_end = action.kind in ("send_states", "receive_gradients")
    return Action(other, action.stage + (1 if towards_the_end else -1), action.micro_batch)  # type: ignore[arg-type]


def peer_of(action: Action, size: PipelineSize) -> int:
    return size.rank_of(counterpart(action).stage)


def list_transfers(order: Order, other: int, size: PipelineSize) -> list[Action]:
    """Return the sends to the rank `other` and the receives from it, in the order in which a rank executes them."""
    return [action for action in order if not action.computes and peer_of(action, size) == other]


def test_transfers_between_two_ranks_have_the_same_order_on_both_ranks() -> None:
    for name, size in CASES:
        schedule = build_schedule(name, size)

        for rank, other in itertools.combinations(range(size.ranks), 2):
            there = list_transfers(schedule[rank], other, size)
            back = list_transfers(schedule[other], rank, size)
            assert [counterpart(action) for action in there] == back


def test_number_of_transfers_per_rank_equals_the_closed_form() -> None:
    for name, size in [case for case in CASES if case[1].ranks > 1]:
        ranks, stages, micro_batches = size
        for rank, order in enumerate(build_schedule(name, size)):
            ends = rank in (0, ranks - 1)
            kinds = Counter(action.kind.partition("_")[0] for action in order)
            assert kinds["send"] == kinds["receive"] == micro_batches * (2 * stages - 1 if ends else 2 * stages)


def test_single_rank_has_no_transfers() -> None:
    assert all(action.computes for action in build_schedule("breadth_first", PipelineSize(1, 6, 4))[0])


def test_order_of_passes_with_a_deadlock_is_refused() -> None:
    size = PipelineSize(2, 1, 2)
    first, second = (
        (Action("forward", 0, 0), Action("backward", 0, 1)),
        (Action("forward", 0, 1), Action("backward", 0, 0)),
    )
    crossed = (
        (*first, *second),
        tuple(action._replace(stage=1) for action in (second[0], first[1], first[0], second[1])),
    )
    with pytest.raises(ValueError, match="no rank can go on"):
        add_transfers(crossed, size)
    with pytest.raises(ValueError, match="does not end"):
        simulate_schedule(crossed, size, [1, 1], [2, 2])


@pytest.mark.parametrize(("name", "size", "rule"), [
    ("gpipe", PipelineSize(2, 2, 4), "one stage per rank"),
    ("1f1b", PipelineSize(2, 2, 4), "one stage per rank"),
    ("interleaved", PipelineSize(2, 1, 4), "several stages per rank"),
    ("interleaved", PipelineSize(4, 2, 6), "4 micro-batches at a time"),
])  # fmt: skip
def test_schedule_for_an_unsupported_size_is_refused(name: ScheduleName, size: PipelineSize, rule: str) -> None:
    obstacle = find_obstacle(name, size)
    assert obstacle and rule in obstacle[0]
    with pytest.raises(ValueError, match=rule):
        build_schedule(name, size)


# time and memory


def test_bubble_equals_the_closed_form() -> None:
    """The idle time divided by the busy time is (P − 1) / (v·m), with P ranks, v stages per rank and m micro-batches
    (arXiv 2104.04473, section 2.2, and 2211.05953)."""
    for name, size in FULL:
        assert bubble(simulate(name, size)) == pytest.approx(
            (size.ranks - 1) / (size.stages_per_rank * size.micro_batches)
        )


@pytest.mark.parametrize(
    "size", [PipelineSize(4, 4, 2), PipelineSize(8, 4, 4), PipelineSize(4, 2, 2), PipelineSize(8, 2, 4)]
)
def test_breadth_first_with_fewer_micro_batches_than_ranks_has_a_larger_bubble(size: PipelineSize) -> None:
    ranks, stages, micro_batches = size
    wanted = ((ranks - 1) + (stages - 1) * (ranks - micro_batches)) / (stages * micro_batches)
    assert bubble(simulate("breadth_first", size)) == pytest.approx(wanted)


def test_passes_in_flight_per_rank_equal_the_closed_form() -> None:
    for name, size in FULL:
        ranks, stages, micro_batches = size
        wanted = {
            "gpipe": [micro_batches] * ranks,
            "breadth_first": [micro_batches * stages] * ranks,
            "1f1b": [min(micro_batches, ranks - rank) for rank in range(ranks)],
            "interleaved": [
                min(micro_batches * stages, 2 * (ranks - rank - 1) + (stages - 1) * ranks + 1) for rank in range(ranks)
            ],
        }
        assert list(simulate(name, size).passes_in_flight) == wanted[name]


def test_passes_in_flight_of_1f1b_do_not_grow_with_micro_batches() -> None:
    kept = {simulate("1f1b", PipelineSize(4, 1, micro)).passes_in_flight for micro in (4, 8, 64, 256)}
    assert kept == {(4, 3, 2, 1)}


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "breadth_first"])
def test_at_most_4_receives_are_posted_before_their_use(name: ScheduleName) -> None:
    """A rank posts a receive before the pass that reads the received tensor. On every rank, at most 4 posted receives
    are unread at any time. The limit holds for any number of micro-batches; the test has 64."""
    size = PipelineSize(4, 1, 64)
    for order in build_schedule(name, size):
        posted = most = 0
        for action in order:
            posted += action.kind.startswith("receive")
            posted -= action.computes and find_source(action, size) is not None
            most = max(most, posted)
        assert most <= 4


def test_step_time_includes_the_slowest_stage_and_the_transfer_time() -> None:
    size = PipelineSize(2, 1, 3)
    schedule = build_schedule("gpipe", size)
    step = simulate_schedule(schedule, size, [1.0, 3.0], [2.0, 6.0], hop_s=0.5)
    # rank 1 starts at 1.5 s and computes without a pause; then a transfer and the last backward of rank 0 follow
    assert step.finish_s[Action("backward", 1, 2)] == pytest.approx(1.5 + 3 * 3 + 3 * 6)
    assert step.total_s == pytest.approx(1.5 + 9 + 18 + 0.5 + 2)
    assert step.busy_s == (9.0, 27.0)
    assert step.idle_s == pytest.approx((22.0, 4.0))


@given(st.data())
def test_pass_begins_after_its_input_arrives_and_its_rank_is_free(data: st.DataObject) -> None:
    name, size = data.draw(st.sampled_from(CASES))
    seconds = st.lists(st.floats(0.1, 10), min_size=size.stages, max_size=size.stages)
    forward_s, backward_s, hop_s = data.draw(seconds), data.draw(seconds), data.draw(st.floats(0, 5))
    step = simulate_schedule(build_schedule(name, size), size, forward_s, backward_s, hop_s)
    begin_s = {
        action: end_s - (forward_s if action.kind == "forward" else backward_s)[action.stage]
        for action, end_s in step.finish_s.items()
    }
    for action, begins_s in begin_s.items():
        source = find_source(action, size)
        if source is not None:
            apart = size.rank_of(source.stage) != size.rank_of(action.stage)
            assert begins_s >= step.finish_s[source] + apart * hop_s - 1e-9
    for order in build_computation(name, size):
        assert all(begin_s[later] >= step.finish_s[first] - 1e-9 for first, later in itertools.pairwise(order))
    assert all(idle_s >= -1e-9 for idle_s in step.idle_s)
    assert sum(step.busy_s) == pytest.approx(size.micro_batches * (sum(forward_s) + sum(backward_s)))


# gathers of weights


@pytest.mark.parametrize("ahead", [0, 1, 2])
@pytest.mark.parametrize(("name", "size"), [case for case in FULL if case[1].micro_batches >= 8][::3])
def test_stage_computes_only_while_its_weights_are_gathered(name: ScheduleName, size: PipelineSize, ahead: int) -> None:
    for order in build_schedule(name, size):
        whole = set[int]()
        for action in add_gathers(order, ahead):
            if action.kind == "gather":
                assert action.stage not in whole
                whole.add(action.stage)
            elif action.kind == "release":
                whole.remove(action.stage)
            elif action.computes:
                assert action.stage in whole
            assert len(whole) <= 1 + ahead
        assert not whole
        added = "gather", "release", "reduce"
        assert tuple(action for action in add_gathers(order, ahead) if action.kind not in added) == order


@pytest.mark.parametrize(("ranks", "stages", "ahead"), [*itertools.product((1, 2, 4), (1, 2, 3, 12), (0, 1, 2))])
def test_breadth_first_gathers_each_stage_twice_except_the_last_stages_of_the_forward(
    ranks: int, stages: int, ahead: int
) -> None:
    for order in build_schedule("breadth_first", PipelineSize(ranks, stages, 8)):
        gathers = Counter(action.kind for action in add_gathers(order, ahead))["gather"]
        assert gathers == 2 * stages - min(stages, ahead + 1)


@pytest.mark.parametrize(("name", "size"), FULL[::5])
def test_gradients_of_a_stage_are_reduced_once_after_its_last_backward(name: ScheduleName, size: PipelineSize) -> None:
    for order in build_schedule(name, size):
        left = Counter(action.stage for action in order if action.kind == "backward")
        reduced = []
        for action in add_gathers(order):
            left[action.stage] -= action.kind == "backward"
            if action.kind == "reduce":
                assert left[action.stage] == 0
                reduced.append(action.stage)
        assert sorted(reduced) == sorted(left)


def test_gathers_of_layered_accumulation_do_not_grow_with_micro_batches() -> None:
    """In layered accumulation, a stage runs all micro-batches before the next stage runs. So a rank with twelve stages
    gathers weights 22 times, for 8 micro-batches as well as for 64. If each micro-batch ran through all stages before
    the next one, 8 micro-batches would need about 200 gathers."""
    few, many = (
        sum(action.kind == "gather" for action in add_gathers(build_schedule("breadth_first", size)[0]))
        for size in (PipelineSize(1, 12, 8), PipelineSize(1, 12, 64))
    )
    assert few == many == 22


def test_passes_in_flight_are_forwards_without_their_backward() -> None:
    passes = [Action("forward", 0, 0), Action("forward", 0, 1), Action("backward", 0, 1), Action("backward", 0, 0)]
    assert count_passes_in_flight(tuple(passes)) == 2
