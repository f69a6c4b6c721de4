"""torch's FSDP2: fully_shard on every block of layers, and on the model for what is in no block.

Weights are kept in fp32 and divided, with AdamW's two moments 12 bytes per parameter among the ranks that share a copy;
below fp32 they are cast where they are gathered, and gradients come back in fp32. Embedding, head and last norms are
gathered once per micro-step and stay whole until its backward ends, since both begin and end with them.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Module, ModuleList, Parameter
from torch.optim import Optimizer

from bench.core.engine_facts import SUMMED_STEPS
from bench.core.spec import OptimizerSpec, RunSpec
from bench.engines import trained
from bench.engines.distributed.ranks import load_random_state, save_random_state, sum_squares, weigh
from bench.engines.fsdp import shards
from bench.engines.fsdp.options import Options, options_of, shard_ranks
from bench.engines.fsdp.shards import SHARD
from bench.engines.precision.update import torch_dtype

SMALLEST = 1e-6
"""What torch.nn.utils.clip_grads_with_norm_ adds to a norm before it divides by it."""


class ShardedUpdate:
    """Updates `parameters` from their gradients, which FSDP has reduced and divided as it divided them."""

    def __init__(self, parameters: Sequence[Parameter], optimizer: OptimizerSpec) -> None:
        self._parameters = list(parameters)
        self._clipping = optimizer.gradient_clipping
        fused = optimizer.implementation == "fused"
        on_gpu = self._parameters[0].device.type == "cuda"
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
            # on a GPU torch takes all tensors at once by itself, but not where they are DTensors
            foreach=True if on_gpu and not fused else None,
            fused=True if fused else None,
        )
        self.norm: Tensor | None = None  # of the last step, before clipping; 0-d
        self.steps = 0  # so far, over all attempts at a training

    def set_learning_rate(self, rate: float) -> None:
        """Update with another learning rate from now on."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate

    def __call__(self) -> None:
        """Make one step."""
        gradients = [_local(parameter.grad) for parameter in self._parameters if parameter.grad is not None]
        self.norm = self._add_over_ranks(torch.nn.utils.get_total_norm(gradients).square()).sqrt()
        summed = self._add_over_ranks(sum_squares(gradients)).sqrt() if self.steps < SUMMED_STEPS else self.norm
        if self._clipping > 0:
            factor = (self._clipping / (self.norm + SMALLEST)).clamp(max=1.0)
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.norm = summed
        self.steps += 1

    def _add_over_ranks(self, square: Tensor) -> Tensor:
        """Return the sum of all ranks' squares: one call, where DTensor's own norm takes one for every parameter."""
        parameter = self._parameters[0]
        assert isinstance(parameter, DTensor)
        mesh = parameter.device_mesh
        square = square.to(mesh.device_type)
        dist.all_reduce(square, group=mesh.get_group(SHARD))
        return square


def _local(gradient: Tensor) -> Tensor:
    assert isinstance(gradient, DTensor)
    return gradient.to_local()


def save_checkpoint(folder: Path, module: Module, optimizer: Optimizer, steps: int) -> None:
    """Write weights, the optimizer's state, each rank's random state and `steps`. Collective."""
    model, state = get_state_dict(module, optimizer)
    state_dict_saver.save({"model": model, "optimizer": state, "steps": torch.tensor(steps)}, checkpoint_id=folder)
    save_random_state(folder)


def load_checkpoint(folder: Path, module: Module, optimizer: Optimizer) -> int:
    """Load what `save_checkpoint` wrote, on as many ranks, and return its `steps`. Collective."""
    model, state = get_state_dict(module, optimizer)
    found: dict[str, Any] = {"model": model, "optimizer": state, "steps": torch.tensor(0)}
    state_dict_loader.load(found, checkpoint_id=folder)
    set_state_dict(module, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    load_random_state(folder)
    return int(found["steps"])


def construction(spec: RunSpec) -> AbstractContextManager[Any]:
    """Return the context in which the model is built, divided as it grows. Collective; the process group exists."""
    return shards.construction(spec)


def whole(parameters: Sequence[Parameter]) -> AbstractContextManager[Any]:
    """Return a context in which `parameters` are whole on every rank; rank 0's changes to them stay. Collective."""
    return shards.whole(parameters)


def parameter_count(parameters: Iterable[Parameter]) -> int:
    """Return the elements of all `parameters`, those divided counted whole."""
    return sum(parameter.numel() for parameter in parameters)


def build(module: Module, spec: RunSpec) -> "FullyShardedEngine":
    """Divide `module` by fully_shard, and give each rank the rows of it that it already has."""
    return FullyShardedEngine(module, spec, options_of(spec))


def blocks(module: Module) -> Iterator[Module]:
    """Yield what is gathered together: the elements of the outermost ModuleLists, in which every family has its
    blocks of layers."""
    for child in module.children():
        if isinstance(child, ModuleList):
            yield from (block for block in child if next(block.parameters(), None) is not None)
        else:
            yield from blocks(child)


class FullyShardedEngine:
    """The engine; see `bench.engines.Engine`."""

    def __init__(self, module: Module, spec: RunSpec, options: Options) -> None:
        self._spec, self._options = spec, options
        self._module: Any = _divided(module, spec, options)
        self._copies = spec.data_parallel // shard_ranks(options, spec)
        self._update = ShardedUpdate(trained(module), spec.optimizer)

    def train_step(self, micro_batches: Iterable[dict[str, Tensor]]) -> Tensor:
        losses, count = [], self._spec.accumulation
        for index, batch in enumerate(weigh(micro_batches, self._spec), start=1):
            self._reduce_after(last=index == count)
            loss = batch.weigh(self._module(**batch.tensors).loss)
            (loss / count).backward()  # the mean over ranks is taken where gradients are reduced
            losses.append(loss.detach().float())
        self._update()
        return torch.stack(losses).mean()

    def _reduce_after(self, *, last: bool) -> None:
        """Say what of the gradients is reduced after the next backward: copies agree on them in the last one."""
        if not self._options.reduce_every_micro_step:
            self._module.set_requires_gradient_sync(last)
        elif self._copies > 1:
            self._module.set_requires_all_reduce(last)

    def evaluate(self, batches: Iterable[dict[str, Tensor]]) -> Tensor:
        self._module.eval()
        with torch.no_grad():
            losses = [self._module(**batch).loss.float() for batch in batches]
        self._module.train()
        self._divide_again()
        return torch.stack(losses).mean()

    def _divide_again(self) -> None:
        """Let go of what a forward without backward leaves whole."""
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def set_learning_rate(self, rate: float) -> None:
        self._update.set_learning_rate(rate)

    def save(self, folder: Path, steps: int) -> None:
        save_checkpoint(folder, self._module, self._update.optimizer, steps)

    def load(self, folder: Path) -> int:
        self._update.steps = load_checkpoint(folder, self._module, self._update.optimizer)
        return self._update.steps

    def gradient_norm(self) -> Tensor | None:
        return self._update.norm

    def skipped_steps(self) -> int:
        return 0  # without a loss scale nothing is left out

    def config(self) -> dict[str, Any]:
        """Return what fully_shard was given, how ranks are divided, and the optimizer."""
        optimizer = {"type": "torch.optim.AdamW", **self._spec.optimizer.model_dump(mode="json")}
        ranks = shard_ranks(self._options, self._spec)
        given = self._options.model_dump(mode="json") | {"shard_ranks": ranks, "copies": self._copies}
        return {"fsdp": given, "precision": self._spec.precision, "optimizer": optimizer}


def _divided(module: Module, spec: RunSpec, options: Options) -> Module:
    """Return `module` under fully_shard with its weights in fp32."""
    kept = _made_meta(module)
    mesh = shards.shard_of(next(iter(kept.values()))).mesh
    policies: dict[str, Any] = {
        "mesh": mesh if mesh.size(0) > 1 else mesh[shards.SHARD],
        "mp_policy": _mixed_precision(spec, options),
        "offload_policy": _offload(options, mesh.device_type),
    }
    for block in blocks(module):
        fully_shard(block, reshard_after_forward=options.reshard_after_forward, **policies)
    fully_shard(module, **policies)  # torch's default for the root: whole from forward to the end of backward
    _fill(module, kept, torch.device("cpu") if options.offload else None)
    return module


def _made_meta(module: Module) -> dict[str, Parameter]:
    """Put a parameter without memory in fp32 into the place of each one; return those that were there, by name."""
    kept = dict(module.named_parameters(remove_duplicate=False))
    empty: dict[Parameter, Parameter] = {}
    for name, parameter in kept.items():
        if parameter not in empty:
            shape = torch.empty(parameter.shape, dtype=torch.float32, device="meta")
            empty[parameter] = Parameter(shape, requires_grad=parameter.requires_grad)
        _put(module, name, empty[parameter])
    return kept


def _fill(module: Module, kept: dict[str, Parameter], place: torch.device | None) -> None:
    """Give each parameter of a divided module this rank's rows; lazily, FSDP takes up what it finds."""
    filled: dict[Parameter, Parameter] = {}
    for name, divided in dict(module.named_parameters(remove_duplicate=False)).items():
        if divided not in filled:
            shard = shards.shard_of(kept[name])
            assert shard.data is not None, f"{name} was not initialised"
            filled[divided] = shards.materialise(divided, shard.data.to(place, torch.float32))
            shard.data = None
        _put(module, name, filled[divided])


def _put(module: Module, name: str, parameter: Parameter) -> None:
    owner, _, own = name.rpartition(".")
    setattr(module.get_submodule(owner), own, parameter)


def _mixed_precision(spec: RunSpec, options: Options) -> MixedPrecisionPolicy:
    if spec.precision == "fp32":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=torch_dtype(spec.precision), reduce_dtype=torch_dtype(options.reduce_dtype or spec.precision)
    )


def _offload(options: Options, device: str) -> OffloadPolicy:
    if not options.offload:
        return OffloadPolicy()
    return CPUOffloadPolicy(pin_memory=options.pin_memory and device == "cuda")
