"""Torch module with the pipeline stages of one rank, and the executor that runs the rank's actions of a schedule.

Autograd computes the passes; isend and irecv transfer their results. The input of a forward pass stays in its receive
buffer until the backward of this pass. The output of a stage is freed once it is sent. The autograd graph stays alive,
because the executor keeps the output's gradient edge. Memory therefore depends on the number of forward passes whose
backward is still to come, not on the number of micro-batches.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import Module, ModuleDict, Parameter

from bench.core.engine_facts import list_stages
from bench.core.network import Part, Stacks
from bench.core.plugins import DividedFamilyBuilder, EngineBuilder
from bench.core.spec import RunSpec
from bench.engines.distributed.flat import GatheredParameters
from bench.engines.distributed.schedule import Action, Order, PipelineSize, find_source, find_target
from bench.engines.distributed.slices import TensorRanks, join_tensor_ranks

Shapes = tuple[tuple[int, int, int], ...]
"""Shapes of the tensors that one stage sends to the next: (batch, length, width) for each stack of layers."""
States = list[Tensor]
"""Tensors that one stage sends to another for one micro-batch, or their gradients: one tensor for each stack of layers.
"""


class RankStages(Module):
    """Pipeline stages of one rank, by stage number, and the parameters that they share with other stages and ranks.

    `named_parameters` yields each parameter once, under its name in the whole model, even if several stages share it.
    """

    def __init__(
        self, stages: Mapping[int, Module], shapes: Shapes, shared: Mapping[str, Sequence[int]],
        among: TensorRanks | None,
    ) -> None:  # fmt: skip
        """Arguments: `shared` has the name of each parameter that several stages share, and the numbers of these
        stages. `among` is the group of tensor-parallel ranks, each with its own slice of every matrix; None if matrices
        are whole."""
        super().__init__()
        self.stages = ModuleDict({str(number): stage for number, stage in stages.items()})
        self.shapes, self.shared, self.among = shapes, shared, among
        # If several stages of this rank have a parameter of the same name, they share one parameter.
        # Identified by name, since the allocation of memory separates tied parameters.
        first: dict[str, Parameter] = {}
        for stage in stages.values():
            for name, parameter in list(stage.named_parameters()):
                if first.setdefault(name, parameter) is not parameter:
                    _replace(stage, parameter, first[name])

    @property
    def first(self) -> Module:
        """The rank's first stage in a forward pass. Callers call the stages one by one. They never call the
        `RankStages` object itself."""
        return next(iter(self.stages.values()))

    def __getitem__(self, number: int) -> Module:
        return self.stages[str(number)]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        found: dict[str, Parameter] = {}
        for stage in self.stages.values():
            for name, parameter in stage.named_parameters(prefix, recurse, remove_duplicate):
                found.setdefault(name, parameter)
        return iter(found.items())


def _replace(module: Module, old: Parameter, new: Parameter) -> None:
    """Replace the parameter `old` by `new` wherever the module or its submodules use it."""
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if parameter is old:
            owner, _, own = name.rpartition(".")
            setattr(module.get_submodule(owner), own, new)


def build_stages(
    spec: RunSpec, rank: int, family: DividedFamilyBuilder, engine: EngineBuilder, network: Stacks,
    parts: Sequence[Part],
) -> RankStages:  # fmt: skip
    """Return the stages of a rank with uninitialised weights. `parts` are the parts of the model, one per stage.
    Collective."""
    among = join_tensor_ranks(spec, rank)
    sliced = {} if among is None else {"among": among}
    stages = {
        number: family.build_part(spec, parts[number], engine.construction(spec), **sliced)
        for number in list_stages(spec, rank)
    }
    shares = spec.parallel.tensor if spec.parallel.sequence else 1
    shapes = tuple((spec.batch.micro, spec.sequence[stack.tokens] // shares, network.width) for stack in network.stacks)
    return RankStages(stages, shapes, family.find_shared(spec, parts), among)


class Neighbours:
    """Communication with the other ranks of the pipeline, including the transfers in progress."""

    def __init__(self, find_rank: Callable[[int], int], shapes: Shapes, like: Tensor, limit: int) -> None:
        """Arguments: `find_rank` returns the rank of a stage. `like` has the dtype and device of sent tensors. `limit`
        is the largest number of unfinished sends."""
        self._find_rank, self._shapes, self._like, self._limit = find_rank, shapes, like, limit
        self._coming: dict[Action, tuple[States, list[dist.Work]]] = {}
        self._leaving: deque[tuple[States, list[dist.Work]]] = deque()
        self.waited: list[tuple[Any, Any]] = []  # begin and end of each wait for another rank

    def receive(self, states_of: Action, source: int) -> None:
        """Start to receive the tensors that stage `source` sends. `states_of` is the forward or backward pass that
        needs these tensors as its input."""
        buffers = [torch.empty(shape, dtype=self._like.dtype, device=self._like.device) for shape in self._shapes]
        works = [_require(dist.irecv(buffer, self._find_rank(source))) for buffer in buffers]
        self._coming[states_of] = buffers, works

    def take(self, states_of: Action) -> States:
        """Wait until the input of a pass is received, and return it."""
        buffers, works = self._coming.pop(states_of)
        self._wait(works)
        return buffers

    def send(self, states: States, target: int) -> None:
        """Start to send to stage `target`. If there are more unfinished sends than the limit, wait for the oldest.
        (gloo completes a send only while the sender waits for it.)"""
        contiguous = [tensor.contiguous() for tensor in states]
        works = [_require(dist.isend(tensor, self._find_rank(target))) for tensor in contiguous]
        self._leaving.append((contiguous, works))
        if len(self._leaving) > self._limit:
            self._wait(self._leaving.popleft()[1])

    def finish(self) -> None:
        """Wait until all sends are finished."""
        while self._leaving:
            self._wait(self._leaving.popleft()[1])

    def _wait(self, works: Sequence[dist.Work]) -> None:
        begin = self.mark()
        for work in works:
            work.wait()
        self.waited.append((begin, self.mark()))

    def mark(self) -> Any:
        """Return a mark of the current time. On a GPU, the mark is an event in the device's stream. On a CPU, it is the
        time of the host's clock in seconds."""
        if not self._like.is_cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def read_s(self, begin: Any, end: Any) -> float:
        """Return the seconds between two time marks. Wait until the device has reached the second mark."""
        if not self._like.is_cuda:
            return float(end - begin)
        end.synchronize()
        return float(begin.elapsed_time(end) / 1000)


def _require(work: dist.Work | None) -> dist.Work:
    assert work is not None, "this rank is in the group"
    return work


class ScheduleExecutor:
    """Executor of the actions (passes, sends, receives and others) that a schedule lists for one rank. It runs the list
    once per step."""

    def __init__(
        self, stages: Mapping[int, Module], order: Order, size: PipelineSize, neighbours: Neighbours,
        gathered: Mapping[int, GatheredParameters],
    ) -> None:  # fmt: skip
        """Arguments: `order` has the rank's actions in a step. `gathered` has, by stage number, the weights that are
        partitioned among data-parallel copies and gathered when needed."""
        self._stages, self._order, self._size, self._neighbours = stages, order, size, neighbours
        self._gathered = gathered
        self._ran: tuple[Any, Any] | None = None  # begin and end of the last step
        self._passes: list[tuple[Action, Any, Any]] = []  # passes of the last step with begin and end
        self._begin_step((), ())

    def _begin_step(self, micro_batches: Iterable[dict[str, Tensor]], weights: Sequence[Tensor | None]) -> None:
        self._micro_batches, self._weights = iter(micro_batches), weights
        self._batches: list[dict[str, Tensor]] = []  # micro-batches loaded so far
        # inputs, and gradient edges of the outputs, of passes whose backward is still to come, by stage and micro-batch
        self._under_way: dict[tuple[int, int], tuple[States, list[GradientEdge]]] = {}
        self._leaving: dict[Action, States] = {}  # result of a pass until the next action sends it
        self._handed: dict[Action, States] = {}  # inputs from another stage of this rank, by the pass that uses them
        self._losses: list[Tensor] = []
        self._unit: Any = None  # gradient of a loss, 0-d

    def run(self, micro_batches: Iterable[dict[str, Tensor]], weights: Sequence[Tensor | None] = ()) -> list[Tensor]:
        """Run the forward and backward passes of one step. Return the loss of each micro-batch, 0-d; the list is empty
        if another rank has the last stage.

        Each loss is multiplied by its weight if `weights` are given. Gradients of the mean loss are added to the
        gradients that the parameters already have.
        """
        self._begin_step(micro_batches, weights)
        self._neighbours.waited.clear()
        self._passes.clear()
        begin = self._neighbours.mark()
        for action in self._order:
            self._act(action)
        # sends of the last passes are part of the step, and their buffers must not outlive it
        self._neighbours.finish()
        self._ran, losses = (begin, self._neighbours.mark()), self._losses
        self._begin_step((), ())  # frees the micro-batches before the update
        return losses

    def read_times_s(self) -> tuple[float, float]:
        """Return two times of the last step in seconds: the time from its first to its last action, and the part of
        this time in which the rank waited for other ranks of the pipeline."""
        read_s = self._neighbours.read_s
        return read_s(*self._ran) if self._ran else 0.0, sum(read_s(*span) for span in self._neighbours.waited)

    def list_passes(self) -> list[tuple[Action, float, float]]:
        """Return the forward and backward passes of the last step in execution order, each with its start and end in
        seconds since the start of the step. A pass starts when its input has arrived."""
        read_s, start = self._neighbours.read_s, self._ran[0] if self._ran else None
        return [(action, read_s(start, begin), read_s(start, end)) for action, begin, end in self._passes]

    def _act(self, action: Action) -> None:
        """Execute one action."""
        kind, stage, _ = action
        if kind == "forward":
            self._run_forward(action)
        elif kind == "backward":
            self._run_backward(action)
        elif kind in ("receive_states", "receive_gradients"):
            user = action._replace(kind="forward" if kind == "receive_states" else "backward")
            source = find_source(user, self._size)
            assert source is not None
            self._neighbours.receive(user, source.stage)
        elif kind in ("send_states", "send_gradients"):
            maker = action._replace(kind="forward" if kind == "send_states" else "backward")
            target = find_target(maker, self._size)
            assert target is not None
            self._neighbours.send(self._leaving.pop(maker), target)
        elif stage in self._gathered:
            getattr(self._gathered[stage], kind)()  # gather, release or reduce

    def _run_forward(self, action: Action) -> None:
        if action.stage in self._gathered:
            self._gathered[action.stage].wait()
        inputs = [tensor.requires_grad_() for tensor in self._take(action)]  # (batch, length, width) each
        begin = self._neighbours.mark()
        while len(self._batches) <= action.micro_batch:
            self._batches.append(next(self._micro_batches))  # loaded when first needed
        made = self._stages[action.stage](*inputs, **self._batches[action.micro_batch])
        if isinstance(made, Tensor):  # the loss, 0-d
            weight = self._weights[action.micro_batch] if self._weights else None
            made = made if weight is None else made * weight
            self._losses.append(made.detach().float())
            outputs: tuple[Tensor, ...] = (made / self._size.micro_batches,)
            # gradient 1, since the division by the number of micro-batches is already part of the output
            self._unit = torch.ones_like(outputs[0], requires_grad=False)
        else:
            outputs = made
            self._hand_on(action, [tensor.detach() for tensor in outputs])
        # the edges keep the graph; the outputs themselves may be freed once they are sent
        self._under_way[action.stage, action.micro_batch] = inputs, list(map(get_gradient_edge, outputs))
        self._passes.append((action, begin, self._neighbours.mark()))

    def _run_backward(self, action: Action) -> None:
        if action.stage in self._gathered:
            self._gathered[action.stage].wait()
            self._gathered[action.stage].expect_gradients()
        inputs, edges = self._under_way.pop((action.stage, action.micro_batch))
        gradients = self._take(action) or [self._unit]
        begin = self._neighbours.mark()
        torch.autograd.backward(edges, gradients)
        self._passes.append((action, begin, self._neighbours.mark()))
        del gradients  # freed before new ones are made
        if inputs:  # zeros for an input that the stage did not use
            self._hand_on(action, [torch.zeros_like(one) if one.grad is None else one.grad for one in inputs])

    def _take(self, action: Action) -> States:
        """Return the input tensors of a pass, which another stage of this rank or another rank has computed. Return an
        empty list for a forward pass of the first stage and for a backward pass of the last stage."""
        if find_source(action, self._size) is None:
            return []
        return self._handed.pop(action) if action in self._handed else self._neighbours.take(action)

    def _hand_on(self, action: Action, states: States) -> None:
        """Keep the result of a pass until the next stage uses it, or until it is sent to the rank of that stage."""
        target = find_target(action, self._size)
        assert target is not None
        if self._size.rank_of(target) == self._size.rank_of(action.stage):
            self._handed[action._replace(stage=target)] = states
        else:
            self._leaving[action] = states
