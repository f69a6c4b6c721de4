"""Runs one rank's list of a schedule: forwards and backwards by autograd, transfers by isend and irecv.

A buffer of what is received lives from its receive to its backward; what a stage makes is given up once it is sent, its
graph is kept by its edge alone. So memory follows the passes in flight, and not the number of micro-batches.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Module

from bench.engines.distributed.flat import GatheredParameters
from bench.engines.distributed.schedule import Action, Order, PipelineSize, find_source, find_target
from bench.engines.distributed.stages import Shapes

States = list[Tensor]
"""What goes between two stages for one micro-batch, or its gradients; one tensor for each stack."""


class Neighbours:
    """The other ranks of a pipeline, and what is on its way between them and this one."""

    def __init__(self, find_rank: Callable[[int], int], shapes: Shapes, like: Tensor, limit: int) -> None:
        """`find_rank` gives the rank of a stage, `like` type and device of what is sent; at most `limit` sends are not
        yet waited for."""
        self._find_rank, self._shapes, self._like, self._limit = find_rank, shapes, like, limit
        self._coming: dict[Action, tuple[States, list[dist.Work]]] = {}
        self._leaving: deque[tuple[States, list[dist.Work]]] = deque()
        self.waited: list[tuple[Any, Any]] = []  # begin and end of each wait for another rank

    def receive(self, states_of: Action, source: int) -> None:
        """Begin to receive what the pass `states_of` will take up from a stage."""
        buffers = [torch.empty(shape, dtype=self._like.dtype, device=self._like.device) for shape in self._shapes]
        works = [_known(dist.irecv(buffer, self._find_rank(source))) for buffer in buffers]
        self._coming[states_of] = buffers, works

    def take(self, states_of: Action) -> States:
        """Return what was received for a pass, once it is here."""
        buffers, works = self._coming.pop(states_of)
        self._wait(works)
        return buffers

    def send(self, states: States, target: int) -> None:
        """Begin to send to a stage. Sends that began long ago are waited for: gloo's are complete only then."""
        contiguous = [tensor.contiguous() for tensor in states]
        works = [_known(dist.isend(tensor, self._find_rank(target))) for tensor in contiguous]
        self._leaving.append((contiguous, works))
        if len(self._leaving) > self._limit:
            self._wait_for_oldest()

    def finish(self) -> None:
        """Wait for all that is on its way."""
        while self._leaving:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        self._wait(self._leaving.popleft()[1])

    def _wait(self, works: Sequence[dist.Work]) -> None:
        begin = self.mark()
        for work in works:
            work.wait()
        self.waited.append((begin, self.mark()))

    def mark(self) -> Any:
        """Return this moment: of the device's stream, which is what waits there, or of the host."""
        if not self._like.is_cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read_each_s(self, begin: Any, moments: Sequence[Any]) -> list[float]:
        """Return the seconds from one moment to each of others, which are in their order; it waits as `read_s`."""
        if self._like.is_cuda and moments:
            moments[-1].synchronize()
            return [begin.elapsed_time(moment) / 1000 for moment in moments]
        return [moment - begin for moment in moments]

    def read_s(self, spans: Sequence[tuple[Any, Any]]) -> float:
        """Return the seconds of all spans between two moments; it waits for the device to have come to the last."""
        if self._like.is_cuda and spans:
            spans[-1][1].synchronize()
            return float(sum(begin.elapsed_time(end) / 1000 for begin, end in spans))
        return float(sum(end - begin for begin, end in spans))


def _known(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work


class PassUnderWay(NamedTuple):
    """What a forward leaves to its backward."""

    inputs: States
    edges: list[GradientEdge]  # of its outputs


class ScheduleExecutor:
    """Runs one rank's order of a schedule, step after step."""

    def __init__(
        self, stages: Mapping[int, Module], order: Order, size: PipelineSize, neighbours: Neighbours,
        gathered: Mapping[int, GatheredParameters],
    ) -> None:  # fmt: skip
        """`gathered`: the weights that are divided, by stage."""
        self._stages, self._order, self._size, self._neighbours = stages, order, size, neighbours
        self._ran: list[tuple[Any, Any]] = []  # begin and end of the last step …
        self._passes: list[tuple[Action, Any, Any]] = []  # … and of each of its passes
        self._gathered = gathered

    def run(self, micro_batches: Iterable[dict[str, Tensor]], weights: Sequence[Tensor | None] = ()) -> list[Tensor]:
        """Make the passes of one step; return the loss of each micro-batch, multiplied by its weight if there are
        weights, where the last stage is here. Gradients of their mean are added to those that the parameters have."""
        self._neighbours.waited.clear()
        begin = self._neighbours.mark()
        step = _Step(self._stages, self._size, self._neighbours, self._gathered, iter(micro_batches), weights)
        for action in self._order:
            step.act(action)
        self._neighbours.finish()
        self._ran, self._passes = [(begin, self._neighbours.mark())], step.passes
        return step.losses

    def read_times_s(self) -> tuple[float, float]:
        """Return the seconds from the first to the last action of the last step, and those of them in which this rank
        waited for its neighbours."""
        return self._neighbours.read_s(self._ran), self._neighbours.read_s(self._neighbours.waited)

    def list_passes(self) -> list[tuple[Action, float, float]]:
        """Return the forwards and backwards of the last step in their order, each with its begin and end in seconds
        from the step's; what a pass waits for stands before it."""
        if not self._ran:
            return []
        moments = [moment for _, *both in self._passes for moment in both]
        seconds = iter(self._neighbours.read_each_s(self._ran[0][0], moments))
        return [(action, next(seconds), next(seconds)) for action, *_ in self._passes]


class _Step:
    """One step: what is between its actions."""

    def __init__(
        self, stages: Mapping[int, Module], size: PipelineSize, neighbours: Neighbours,
        gathered: Mapping[int, GatheredParameters], micro_batches: Iterator[dict[str, Tensor]],
        weights: Sequence[Tensor | None],
    ) -> None:  # fmt: skip
        self._weights = weights
        self._stages, self._size, self._neighbours, self._micro_batches = stages, size, neighbours, micro_batches
        self._gathered = gathered
        self._batches: list[dict[str, Tensor]] = []  # taken so far
        self._under_way: dict[tuple[int, int], PassUnderWay] = {}
        self._leaving: dict[Action, States] = {}  # what a pass made that the next action sends
        self._handed: dict[Action, States] = {}  # between two stages of this rank, by the pass that takes it up
        self.losses: list[Tensor] = []
        self.passes: list[tuple[Action, Any, Any]] = []  # with begin and end

    def act(self, action: Action) -> None:
        """Do one action."""
        kind, stage, _ = action
        if kind == "forward":
            self._run_forward(action)
        elif kind == "backward":
            self._run_backward(action)
        elif kind in ("receive_states", "receive_gradients"):
            taker = action._replace(kind="forward" if kind == "receive_states" else "backward")
            source = find_source(taker, self._size)
            assert source is not None
            self._neighbours.receive(taker, source.stage)
        elif kind in ("send_states", "send_gradients"):
            maker = action._replace(kind="forward" if kind == "send_states" else "backward")
            target = find_target(maker, self._size)
            assert target is not None
            self._neighbours.send(self._leaving.pop(maker), target)
        elif stage in self._gathered:
            getattr(self._gathered[stage], kind)()

    def _run_forward(self, action: Action) -> None:
        if action.stage in self._gathered:
            self._gathered[action.stage].wait()
        inputs = [tensor.requires_grad_() for tensor in self._take(action)]
        begin = self._neighbours.mark()
        made = self._stages[action.stage](*inputs, **self._find_batch(action.micro_batch))
        if isinstance(made, Tensor):
            weight = self._weights[action.micro_batch] if self._weights else None
            made = made if weight is None else made * weight
            self.losses.append(made.detach().float())
            outputs: tuple[Tensor, ...] = (made / self._size.micro_batches,)
            self._unit = torch.ones_like(outputs[0], requires_grad=False)
        else:
            outputs = made
            self._give(action, [tensor.detach() for tensor in outputs])
        self._under_way[action.stage, action.micro_batch] = PassUnderWay(inputs, list(map(get_gradient_edge, outputs)))
        self.passes.append((action, begin, self._neighbours.mark()))

    def _run_backward(self, action: Action) -> None:
        if action.stage in self._gathered:
            self._gathered[action.stage].wait()
            self._gathered[action.stage].expect_gradients()
        inputs, edges = self._under_way.pop((action.stage, action.micro_batch))
        gradients = self._take(action) or [self._unit]
        begin = self._neighbours.mark()
        torch.autograd.backward(edges, gradients)
        self.passes.append((action, begin, self._neighbours.mark()))
        del gradients
        if inputs:
            self._give(action, list(map(_get_gradient, inputs)))

    def _take(self, action: Action) -> States:
        """Return what a pass takes up: from a stage of this rank, or of another one; nothing at the pipeline's ends."""
        source = find_source(action, self._size)
        if source is None:
            return []
        if action in self._handed:
            return self._handed.pop(action)
        return self._neighbours.take(action)

    def _give(self, action: Action, states: States) -> None:
        """Keep what a pass made for who takes it up."""
        target = find_target(action, self._size)
        assert target is not None
        if self._size.rank_of(target) == self._size.rank_of(action.stage):
            self._handed[action._replace(stage=target)] = states
        else:
            self._leaving[action] = states

    def _find_batch(self, micro_batch: int) -> dict[str, Tensor]:
        """Return a micro-batch, which is taken when it is needed first."""
        while len(self._batches) <= micro_batch:
            self._batches.append(next(self._micro_batches))
        return self._batches[micro_batch]


def _get_gradient(tensor: Tensor) -> Tensor:
    """Return the gradient of what a stage took up; zeros of what it did not use."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
