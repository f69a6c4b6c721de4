"""Engine for torch's FSDP2. fully_shard is applied to each block of layers, and to the model for the parameters outside
blocks.

Trained weights are kept in fp32 and partitioned among the ranks that share a copy. With AdamW's two moments they take
12 bytes per parameter. In bf16, weights are cast before they are gathered, and gradients are returned in fp32. Frozen
weights are kept in the run's precision. They have no gradients and no moments. Embedding, head and last norms are
gathered once per micro-step, and stay whole until the end of the micro-step's backward. Partitioning these parameters
between forward and backward would be useless, because backward begins with the head.

fully_shard partitions a model that already exists. A whole model might not fit on one rank, so each parameter moves to
the meta device as soon as it is built. After the values of a parameter are drawn, a `Shard` object keeps only this
rank's rows of them. No rank therefore ever holds more than one whole tensor.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import Module, ModuleList, Parameter
from torch.nn.modules.module import register_module_parameter_registration_hook

from bench.core.engine_facts import SUMMED_STEPS
from bench.core.spec import OptimizerSpec, RunSpec
from bench.engines import list_buffers, list_parameters, trained
from bench.engines.distributed.ranks import evaluate, load_random_state, predict_tokens, save_random_state, weigh
from bench.engines.fsdp.options import Options, shard_ranks
from bench.engines.precision.update import (
    build_optimizer,
    describe_optimizer,
    find_clipping_factor,
    on_device,
    parameter_count,
    set_learning_rate,
    sum_squares,
    torch_dtype,
)

__all__ = ["FullyShardedEngine", "build", "construction", "parameter_count", "whole"]

REPLICATE, SHARD = "replicate", "shard"
"""Names of the mesh's dimensions: copies of the model, and the ranks that share one copy."""
_SAVED = StateDictOptions(ignore_frozen_params=True, strict=False)
"""Options for checkpoints: only trained weights are saved. A resumed run rebuilds frozen weights as at its start."""
_HERE = "_zeroscale_shard"
"""Name of the attribute in which a parameter on the meta device keeps its `Shard` (this rank's rows of its values)."""


@dataclass
class Shard:
    """This rank's rows of a parameter, divided as by torch.chunk. `data` is None before the values are drawn."""

    mesh: DeviceMesh
    data: Tensor | None = None

    def keep(self, whole: Tensor) -> None:
        """Store this rank's rows of a whole tensor."""
        chunks = whole.chunk(self.mesh[SHARD].size())
        rank = self.mesh.get_local_rank(SHARD)
        # if there are few rows, torch.chunk returns fewer chunks than ranks, and the last ranks get no rows
        self.data = chunks[rank].clone() if rank < len(chunks) else whole[:0].clone()

    def gather_into(self, whole: Tensor) -> None:
        """Fill `whole`, a tensor with the shape of the whole parameter, with the parameter's rows from all ranks. Do
        nothing if the initial values of the parameter have not been drawn yet. Collective."""
        if self.data is None:
            return
        ranks = self.mesh[SHARD].size()
        largest = whole.chunk(ranks)[0].shape
        pieces = [whole.new_empty(largest) for _ in range(ranks)]
        mine = torch.zeros_like(pieces[0])  # padded to the largest piece, because gloo gathers pieces of equal size
        mine[: len(self.data)] = self.data
        dist.all_gather(pieces, mine, group=self.mesh.get_group(SHARD))
        whole.copy_(torch.cat(pieces)[: len(whole)])


@contextmanager
def construction(spec: RunSpec) -> Iterator[None]:
    """Return a context that builds modules on this rank's device and in the run's precision. The memory of each
    parameter is freed as soon as its module has registered it. Collective; the process group must exist."""
    ranks = shard_ranks(Options.of(spec), spec)
    with on_device(spec.precision):
        device = torch.empty(()).device.type
    # (copies, ranks of a copy): the ranks of one copy are neighbours
    mesh = init_device_mesh(device, (spec.data_parallel // ranks, ranks), mesh_dim_names=(REPLICATE, SHARD))

    def forget(module: Module, name: str, parameter: Parameter | None) -> Parameter | None:
        if parameter is None or hasattr(parameter, _HERE):
            return None  # a shared parameter is registered more than once
        empty = Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        setattr(empty, _HERE, Shard(mesh))
        return empty

    # torch's hook sees each parameter when its module registers it, before the next one is allocated
    handle = register_module_parameter_registration_hook(forget)  # type: ignore[arg-type]  # it may return another
    try:
        with on_device(spec.precision):
            yield
    finally:
        handle.remove()


@contextmanager
def whole(parameters: Sequence[Parameter]) -> Iterator[None]:
    """Return a context in which `parameters` are whole on every rank. Rank 0's changes to them are kept. The model
    must not have been passed to `build` yet. Collective."""
    # tensors are swapped so that modules keep their parameter objects, which identify tied parameters
    held = [(parameter, _get_shard(parameter)) for parameter in parameters]
    places = []
    for parameter, shard in held:
        place = Parameter(torch.empty_like(parameter, device=shard.mesh.device_type), parameter.requires_grad)
        shard.gather_into(place.data)
        torch.utils.swap_tensors(parameter, place)
        places.append(place)
    yield
    for (parameter, shard), place in zip(held, places, strict=True):
        dist.broadcast(parameter.data, 0)
        shard.keep(parameter.data)
        torch.utils.swap_tensors(parameter, place)


def hold(parameter: Parameter, like: Parameter) -> Parameter:
    """Return a frozen parameter on the meta device, with a `Shard` object that holds this rank's rows of `parameter`.
    `parameter` is whole, and equal on all ranks. The device mesh is taken from `like`, another parameter of the same
    model."""
    empty, shard = Parameter(torch.empty_like(parameter.data, device="meta"), False), Shard(_get_shard(like).mesh)
    shard.keep(parameter.data)
    setattr(empty, _HERE, shard)
    return empty


def _get_shard(parameter: Parameter) -> Shard:
    found: Shard = getattr(parameter, _HERE)
    return found


class ShardedUpdate:
    """Optimizer update of `parameters`, whose gradients FSDP has already reduced and partitioned like the parameters.

    bitsandbytes has no kernels for DTensors. For its AdamW, `optimizer` updates this rank's rows as plain tensors.
    """

    def __init__(self, parameters: Sequence[Parameter], optimizer: OptimizerSpec) -> None:
        self._parameters, self._rows = list(parameters), list[Parameter]()
        self._clipping = optimizer.gradient_clipping
        on_gpu, fused = self._parameters[0].device.type == "cuda", optimizer.implementation == "fused"
        if optimizer.name == "adamw_8bit":
            self._rows = [Parameter(_get_rows(one), one.requires_grad) for one in self._parameters]
        # on a GPU torch's default updates all tensors at once, except for DTensors
        foreach = True if on_gpu and not fused else None
        self.optimizer = build_optimizer(self._rows or self._parameters, optimizer, foreach=foreach)
        # True if the optimizer's state belongs to plain tensors with this rank's rows, not to the DTensors
        self.has_plain_state = bool(self._rows)
        self.norm: Tensor | None = None  # of the last step's gradients before clipping; 0-d
        self.steps = 0  # optimizer steps so far, including those before a resume

    def __call__(self) -> None:
        """Make one optimizer step. Collective."""
        gradients: list[Tensor] = [one.grad.to_local() for one in self._parameters if isinstance(one.grad, DTensor)]
        norm = self._add_over_ranks(torch.nn.utils.get_total_norm(gradients).square()).sqrt()
        # computed before clipping, which scales the gradients in place
        self.norm = self._add_over_ranks(sum_squares(gradients)).sqrt() if self.steps < SUMMED_STEPS else norm
        if self._clipping > 0:
            factor = find_clipping_factor(norm, self._clipping)
            torch._foreach_mul_(gradients, factor.to(gradients[0].device))
        for rows, parameter in zip(self._rows, self._parameters, strict=False):
            # FSDP replaces the tensor with the rows, for example at the first forward
            rows.data = _get_rows(parameter)
            rows.grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) and rows.numel() else None
        self.optimizer.step()
        for parameter in (*self._rows, *self._parameters):
            parameter.grad = None
        self.steps += 1

    def _add_over_ranks(self, square: Tensor) -> Tensor:
        """Return the sum of `square`, a squared norm of this rank's gradients, over the ranks that share a copy of the
        model. This sum needs one collective in total, whereas DTensor's own norm needs one collective for every
        parameter."""
        parameter = self._parameters[0]
        assert isinstance(parameter, DTensor)
        mesh = parameter.device_mesh
        square = square.to(mesh.device_type)
        dist.all_reduce(square, group=mesh.get_group(SHARD))
        return square


def _get_rows(parameter: Parameter) -> Tensor:
    """Return the tensor with this rank's rows of a partitioned parameter."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local().detach()


def build(module: Module, spec: RunSpec) -> "FullyShardedEngine":
    """Return the engine with `module` partitioned by fully_shard. Each rank gets its own rows of every parameter, which
    the parameter's `Shard` object holds."""
    return FullyShardedEngine(module, spec, Options.of(spec))


class FullyShardedEngine:
    """FSDP2 engine. `bench.engines.Engine` documents its methods."""

    def __init__(self, module: Module, spec: RunSpec, options: Options) -> None:
        self._spec, self._options = spec, options
        self._module: Any = _divide(module, spec, options)
        self._copies = spec.data_parallel // shard_ranks(options, spec)
        self._update = ShardedUpdate(trained(module), spec.optimizer)

    def train_step(self, micro_batches: Iterable[dict[str, Tensor]]) -> Tensor:
        losses, count = [], self._spec.accumulation
        for index, batch in enumerate(weigh(micro_batches, self._spec), start=1):
            # gradients are averaged over copies only in the last micro-step
            if not self._options.reduce_every_micro_step:
                self._module.set_requires_gradient_sync(index == count)
            elif self._copies > 1:
                self._module.set_requires_all_reduce(index == count)
            loss = batch.weigh(self._module(**batch.tensors).loss)  # 0-d
            (loss / count).backward()  # the reduction of gradients computes the mean over ranks
            losses.append(loss.detach().float())
        self._update()
        return torch.stack(losses).mean()

    def evaluate(self, batches: Iterable[dict[str, Tensor]]) -> Tensor:
        loss = evaluate(self._module, batches)
        self._reshard()
        return loss

    def predict_tokens(self, tensors: dict[str, Tensor]) -> Tensor:
        tokens = predict_tokens(self._module, tensors)
        self._reshard()
        return tokens

    def _reshard(self) -> None:
        """Partition the weights again. Call this after a forward pass that no backward pass follows, because such a
        pass leaves the weights whole."""
        for module in self._module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def set_learning_rate(self, rate: float) -> None:
        set_learning_rate(self._update.optimizer, rate)

    def save(self, folder: Path, steps: int) -> None:
        state_dict_saver.save({**self._get_state(), "steps": torch.tensor(steps)}, checkpoint_id=folder)
        if self._update.has_plain_state:
            torch.save(self._update.optimizer.state_dict(), _find_own_state(folder))
        save_random_state(folder)

    def load(self, folder: Path) -> int:
        found: dict[str, Any] = {**self._get_state(), "steps": torch.tensor(0)}
        state_dict_loader.load(found, checkpoint_id=folder)  # fills the tensors of `found`
        if self._update.has_plain_state:
            set_model_state_dict(self._module, found["model"], options=_SAVED)
            self._update.optimizer.load_state_dict(torch.load(_find_own_state(folder), map_location="cpu"))
        else:
            model, state = found["model"], found["optimizer"]
            set_state_dict(
                self._module, self._update.optimizer, model_state_dict=model, optim_state_dict=state, options=_SAVED
            )
        load_random_state(folder)
        self._update.steps = int(found["steps"])
        return self._update.steps

    def _get_state(self) -> dict[str, Any]:
        """Return the state of the model and of the optimizer. The optimizer's state is omitted if each rank writes it
        to its own file."""
        if self._update.has_plain_state:
            return {"model": get_model_state_dict(self._module, options=_SAVED)}
        model, state = get_state_dict(self._module, self._update.optimizer, options=_SAVED)
        return {"model": model, "optimizer": state}

    def list_weights(self, only_trained: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in list_parameters(self._module, only_trained):
            # cast before the gather, as for a forward pass; offloaded rows are gathered on the device
            rows: Any = parameter.detach().to(torch_dtype(self._spec.precision))
            yield name, rows.to(rows.device_mesh.device_type).full_tensor()
        yield from () if only_trained else list_buffers(self._module)

    def gradient_norm(self) -> Tensor | None:
        return self._update.norm

    def skipped_steps(self) -> int:
        return 0  # without a loss scale no step is skipped

    def config(self) -> dict[str, Any]:
        """Return the arguments of fully_shard, the number of ranks that share a copy of the model, the number of
        copies, the precision, and the optimizer's settings."""
        ranks = shard_ranks(self._options, self._spec)
        given = self._options.model_dump(mode="json") | {"shard_ranks": ranks, "copies": self._copies}
        return {"fsdp": given, "precision": self._spec.precision, "optimizer": describe_optimizer(self._spec)}


def _find_own_state(folder: Path) -> Path:
    return folder / f"optimizer_state_{dist.get_rank()}.pt"


def _divide(module: Module, spec: RunSpec, options: Options) -> Module:
    """Apply fully_shard to `module`, convert its trained weights to fp32, and return it."""
    kept = _replace_by_meta(module)
    mesh = _get_shard(next(iter(kept.values()))).mesh
    precision, offload = MixedPrecisionPolicy(), OffloadPolicy()
    if spec.precision != "fp32":
        weights, reduced = torch_dtype(spec.precision), torch_dtype(options.reduce_dtype or spec.precision)
        precision = MixedPrecisionPolicy(param_dtype=weights, reduce_dtype=reduced)
    if options.offload:
        offload = CPUOffloadPolicy(pin_memory=options.pin_memory and mesh.device_type == "cuda")
    policies: dict[str, Any] = {
        "mesh": mesh if mesh.size(0) > 1 else mesh[SHARD], "mp_policy": precision, "offload_policy": offload,
    }  # fmt: skip
    # blocks first, so that the root gets only the parameters outside blocks
    for block in _list_blocks(module):
        fully_shard(block, reshard_after_forward=options.reshard_after_forward, **policies)
    fully_shard(module, **policies)  # by torch's default, the root's weights stay whole until backward ends
    _fill(module, kept, torch.device("cpu") if options.offload else None)
    return module


def _list_blocks(module: Module) -> Iterator[Module]:
    """Yield the modules that FSDP gathers as one unit. They are the elements of the outermost ModuleLists, which are
    the blocks of layers in every model family."""
    for child in module.children():
        if isinstance(child, ModuleList):
            yield from (block for block in child if next(block.parameters(), None) is not None)
        else:
            yield from _list_blocks(child)


def _replace_by_meta(module: Module) -> dict[str, Parameter]:
    """Replace each parameter by a parameter on the meta device, in fp32 if it is trained. Return the replaced
    parameters by name."""
    kept = dict(module.named_parameters(remove_duplicate=False))
    empty: dict[Parameter, Parameter] = {}
    for name, parameter in kept.items():
        if parameter not in empty:
            dtype = torch.float32 if parameter.requires_grad else parameter.dtype
            shape = torch.empty(parameter.shape, dtype=dtype, device="meta")
            empty[parameter] = Parameter(shape, requires_grad=parameter.requires_grad)
        _put(module, name, empty[parameter])
    return kept


def _fill(module: Module, kept: dict[str, Parameter], place: torch.device | None) -> None:
    """Fill each partitioned parameter of `module` with this rank's rows of the initialised weights, in the parameter's
    dtype. `kept` maps parameter names to the original parameters, whose `Shard` objects hold these rows. If `place` is
    not None, the rows move to this device. FSDP reads the rows later, when it initialises itself in the first forward
    pass."""
    filled: dict[Parameter, Parameter] = {}
    for name, divided in dict(module.named_parameters(remove_duplicate=False)).items():
        if divided not in filled:
            shard = _get_shard(kept[name])
            assert shard.data is not None, f"{name} was not initialised"
            assert isinstance(divided, DTensor)
            rows = DTensor.from_local(
                shard.data.to(place, divided.dtype), divided.device_mesh, divided.placements, run_check=False,
                shape=divided.shape, stride=divided.stride(),
            )  # fmt: skip
            filled[divided] = Parameter(rows, requires_grad=divided.requires_grad)
            shard.data = None  # freed tensor by tensor, so that no second copy of the model exists
        _put(module, name, filled[divided])


def _put(module: Module, name: str, parameter: Parameter) -> None:
    owner, _, own = name.rpartition(".")
    setattr(module.get_submodule(owner), own, parameter)
