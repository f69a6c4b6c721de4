"""Script that forks two ranks, which make the same computations with our code and with torch's: `python oracle_ranks.py
OUT`.

The computations are pipeline schedules and tensor-parallel layers. The ranks connect through a file next to OUT. Each
rank writes OUT-<rank>.pt with pairs of results (ours, torch's) by names of the comparison and the tensor.
"""

import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F

from bench.core.network import IGNORED
from bench.engines.distributed.executor import Neighbours, ScheduleExecutor
from bench.engines.distributed.schedule import PipelineSize, ScheduleName, build_schedule
from bench.engines.distributed.slices import (
    SlicedEmbedding,
    SummedLinear,
    TensorRanks,
    UnslicedGradients,
    compute_sliced_loss,
    cut_weights,
    mark_slices,
)

RANKS, MICRO_BATCHES, SAMPLES, TOKENS, WIDTH, INNER, VOCABULARY = 2, 4, 3, 6, 8, 12, 10
SCHEDULES: dict[ScheduleName, tuple[Any, int]] = {
    "gpipe": (ScheduleGPipe, 1), "1f1b": (Schedule1F1B, 1), "interleaved": (ScheduleInterleaved1F1B, 2),
}  # fmt: skip
"""torch's class and the number of stages per rank, for each schedule."""
REDUCTIONS = ("mean", "sum")
Both = dict[str, tuple[Tensor, Tensor]]
"""Pairs of results, ours and torch's, by name of the tensor."""


def main() -> None:
    children = []
    for rank in range(RANKS):
        if (child := os.fork()) == 0:
            status = 1
            try:
                run_rank(sys.argv[1], rank)
                status = 0
            finally:
                if status:
                    sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                os._exit(status)
        children.append(child)
    if any(os.waitpid(child, 0)[1] for child in children):
        sys.exit("a rank failed")


def run_rank(out: str, rank: int) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning)  # torch's warnings about renamed collectives
    dist.init_process_group("gloo", f"file://{out}-meeting", rank=rank, world_size=RANKS)
    mesh, group = init_device_mesh("cpu", (RANKS,)), dist.group.WORLD
    assert group is not None
    seen: dict[str, Both] = {name: run_schedule(name, rank) for name in SCHEDULES}
    for by_tokens in (False, True):
        among = TensorRanks(group, RANKS, rank, by_tokens)
        seen[f"region{', by tokens' * by_tokens}"] = run_region(among, mesh)
        seen[f"embedding{', by tokens' * by_tokens}"] = run_embedding(among, mesh)
    for reduction in REDUCTIONS:
        seen[f"loss, {reduction}"] = run_loss(TensorRanks(group, RANKS, rank, False), mesh, reduction)
    torch.save(seen, f"{out}-{rank}.pt")
    dist.barrier()


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, states: Tensor) -> Tensor:
        return self.linear(states).tanh()  # type: ignore[no-any-return]


class Stage(nn.Module):
    """Pipeline stage with one layer, which our executor can call. It returns the loss if it is the last stage, and its
    output otherwise."""

    def __init__(self, layer: Layer, *, last: bool) -> None:
        super().__init__()
        self.layer, self.last = layer, last

    def forward(self, *states: Tensor, inputs: Tensor, target: Tensor) -> Tensor | tuple[Tensor]:
        made = self.layer(*states or [inputs])
        return F.mse_loss(made, target) if self.last else (made,)


def run_schedule(name: ScheduleName, rank: int) -> Both:
    """Run a step of a pipeline schedule with our executor and with torch's. Return pairs of results (ours, torch's):
    the gradients of this rank's stages and, on the last rank, the loss of each micro-batch."""
    kind, stages = SCHEDULES[name]
    size = PipelineSize(RANKS, stages, MICRO_BATCHES)
    torch.manual_seed(1)
    layers = [Layer() for _ in range(size.stages)]
    inputs, target = torch.randn(2, MICRO_BATCHES, SAMPLES, WIDTH)
    mine = {stage: layers[stage] for stage in size.stages_of(rank)}

    neighbours = Neighbours(size.rank_of, ((SAMPLES, WIDTH),), torch.empty(1), limit=2 * RANKS)
    called = {stage: Stage(layer, last=stage == size.stages - 1) for stage, layer in mine.items()}
    executor = ScheduleExecutor(called, build_schedule(name, size)[rank], size, neighbours, {})
    losses = executor.run([{"inputs": a, "target": b} for a, b in zip(inputs, target, strict=True)])
    ours = take_gradients(mine)

    theirs = list[Tensor]()
    parts = [PipelineStage(layer, stage, size.stages, torch.device("cpu")) for stage, layer in mine.items()]
    schedule = kind(parts if stages > 1 else parts[0], MICRO_BATCHES, loss_fn=F.mse_loss)
    given = {"target": target.flatten(0, 1), "losses": theirs} if rank == RANKS - 1 else {}
    schedule.step(*([] if rank else [inputs.flatten(0, 1)]), **given)
    seen = {f"loss {micro}": (a, b.detach()) for micro, (a, b) in enumerate(zip(losses, theirs, strict=True))}
    return {**seen, **pair_up(ours, take_gradients(mine))}


def take_gradients(layers: dict[int, Layer]) -> dict[str, Tensor]:
    """Return copies of the layers' gradients by name, and clear the gradients."""
    taken = {
        f"{stage}.{name}": parameter.grad.clone()
        for stage, layer in layers.items()
        for name, parameter in layer.named_parameters()
        if parameter.grad is not None
    }
    for layer in layers.values():
        layer.zero_grad()
    return taken


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, states: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(states)))  # type: ignore[no-any-return]


def run_region(among: TensorRanks, mesh: DeviceMesh) -> Both:
    """Compare a feed-forward layer under tensor parallelism: ours with torch's `parallelize_module`. The rows of the
    first weight matrix and the columns of the second are divided between the ranks. The bias of the second matrix is
    whole on each rank."""
    torch.manual_seed(2)
    whole, states, upstream = FeedForward(), *torch.randn(2, SAMPLES, TOKENS, WIDTH)
    # `keep_own_tokens` divides the last dimension
    states, upstream = (tensor.transpose(1, 2) for tensor in (states, upstream))
    states, upstream = (among.keep_own_tokens(tensor).transpose(1, 2).contiguous() for tensor in (states, upstream))
    sliced = FeedForward()
    cut_weights(sliced, {"up": 0, "down": 1}, among)
    mark_slices(sliced, {"up": 0, "down": 1}, among)
    with torch.no_grad():
        for mine, all_of_it in zip(sliced.parameters(), whole.parameters(), strict=True):
            part = getattr(mine, "tensor_slice", None)
            mine.copy_(part.cut(all_of_it) if part else all_of_it)
    last = SummedLinear(sliced.down, among)

    def run_ours(inputs: Tensor) -> Tensor:
        return last(F.gelu(sliced.up(among.enter(inputs))))  # type: ignore[no-any-return]

    ours = run_backward(run_ours, states, upstream)
    UnslicedGradients(list(sliced.parameters()), among).reduce()
    layout = Shard(1) if among.sequence else Replicate()
    plan = {"up": ColwiseParallel(input_layouts=layout), "down": RowwiseParallel(output_layouts=layout)}
    theirs = run_backward(parallelize_module(whole, mesh, plan), states, upstream)
    return pair_up(ours | list_gradients(sliced), theirs | list_gradients(whole))


def run_embedding(among: TensorRanks, mesh: DeviceMesh) -> Both:
    torch.manual_seed(3)
    whole, tokens = nn.Embedding(VOCABULARY, WIDTH), torch.randint(VOCABULARY, (SAMPLES, TOKENS))
    own = nn.Embedding(VOCABULARY // RANKS, WIDTH, _weight=whole.weight.detach().chunk(RANKS)[among.rank].clone())
    sliced = SlicedEmbedding(own, among)
    layout = Shard(1) if among.sequence else Replicate()
    plan = RowwiseParallel(input_layouts=Replicate(), output_layouts=layout)
    divided = parallelize_module(nn.ModuleDict({"table": whole}), mesh, {"table": plan})["table"]
    made, there = sliced(tokens), divided(tokens)
    upstream = torch.randn(SAMPLES, TOKENS, WIDTH)[:, : made.shape[1]]
    for states in (made, there):
        states.backward(upstream)
    states, others = {"states": made.detach()}, {"states": there.detach()}
    return pair_up(states | list_gradients(own), others | list_gradients(divided))


def run_loss(among: TensorRanks, mesh: DeviceMesh, reduction: str) -> Both:
    torch.manual_seed(4)
    whole, labels = torch.randn(SAMPLES * TOKENS, VOCABULARY) * 4, torch.randint(VOCABULARY, (SAMPLES * TOKENS,))
    labels[::5] = IGNORED
    own, theirs = (whole.chunk(RANKS, 1)[among.rank].clone().requires_grad_() for _ in range(2))
    loss = compute_sliced_loss(own, labels, among, reduction)
    (loss * 3).backward()
    with loss_parallel():
        logits = DTensor.from_local(theirs, mesh, [Shard(1)])
        there: Any = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction=reduction)
        (there * 3).backward()
    assert own.grad is not None and theirs.grad is not None
    return {"loss": (loss.detach(), there.detach().full_tensor()), "gradient": (own.grad, theirs.grad)}


def run_backward(run: Callable[[Tensor], Tensor], states: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    inputs = states.clone().requires_grad_()
    made = run(inputs)
    made.backward(upstream)
    assert inputs.grad is not None
    return {"states": made.detach(), "gradient of states": inputs.grad}


def list_gradients(module: nn.Module) -> dict[str, Tensor]:
    """Return this rank's slice of each parameter's gradient, by name. For a parameter that is not sliced, return the
    gradient summed over all ranks."""
    return {name: take_own(parameter.grad, parameter) for name, parameter in module.named_parameters()}


def take_own(gradient: Any, parameter: nn.Parameter) -> Tensor:
    if isinstance(parameter, DTensor):
        gradient = gradient.redistribute(placements=parameter.placements).to_local()
    return gradient  # type: ignore[no-any-return]


def pair_up(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> Both:
    assert ours.keys() == theirs.keys()
    return {name: (ours[name], theirs[name].clone()) for name in ours}  # cloning waits for the asynchronous collective


if __name__ == "__main__":
    main()
