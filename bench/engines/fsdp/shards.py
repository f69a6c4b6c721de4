"""A model that is divided among ranks as it grows: no rank ever holds more than one whole tensor of it.

fully_shard divides a model that exists. Before, while it is built and its weights are drawn, a parameter here is one on
the meta device; what a rank keeps of it lies in its `Shard`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn import Module, Parameter
from torch.nn.modules.module import register_module_parameter_registration_hook

from bench.core.spec import RunSpec
from bench.engines.fsdp.options import options_of, shard_ranks
from bench.engines.precision.update import on_device

REPLICATE, SHARD = "replicate", "shard"
"""Dimensions of the mesh: copies of the model, and the ranks of one copy."""
_HERE = "_zeroscale_shard"


@dataclass
class Shard:
    """What this rank holds of a parameter: its chunk of rows, as torch.chunk makes them; None before it was drawn."""

    mesh: DeviceMesh
    data: Tensor | None = None

    def keep(self, whole: Tensor) -> None:
        """Keep this rank's rows of a whole tensor."""
        chunks = whole.chunk(self.mesh[SHARD].size())
        rank = self.mesh.get_local_rank(SHARD)
        self.data = chunks[rank].clone() if rank < len(chunks) else whole[:0].clone()

    def gather_into(self, whole: Tensor) -> None:
        """Fill a whole tensor with the rows of all ranks; leave it as it is where nothing was drawn yet. Collective."""
        if self.data is None:
            return
        sizes = [chunk.shape for chunk in whole.chunk(self.mesh[SHARD].size())]
        pieces = [whole.new_empty(sizes[0]) for _ in range(self.mesh[SHARD].size())]
        mine = torch.zeros_like(pieces[0])  # as large as the largest: gloo gathers equal ones
        mine[: len(self.data)] = self.data
        dist.all_gather(pieces, mine, group=self.mesh.get_group(SHARD))
        whole.copy_(torch.cat(pieces)[: len(whole)])


def mesh_of(spec: RunSpec) -> DeviceMesh:
    """Return the ranks as copies × ranks of a copy; those of one copy are neighbours. Collective."""
    ranks = shard_ranks(options_of(spec), spec)
    with on_device(spec.precision):
        device = torch.empty(()).device.type
    shape = (spec.data_parallel // ranks, ranks)
    return init_device_mesh(device, shape, mesh_dim_names=(REPLICATE, SHARD))


@contextmanager
def construction(spec: RunSpec) -> Iterator[None]:
    """Build modules on this rank's device and in the run's precision; a parameter's memory goes as soon as its module
    has it."""
    mesh = mesh_of(spec)

    def forget(module: Module, name: str, parameter: Parameter | None) -> Parameter | None:
        if parameter is None or hasattr(parameter, _HERE):
            return None  # one that modules share comes again
        empty = Parameter(torch.empty_like(parameter, device="meta"), parameter.requires_grad)
        setattr(empty, _HERE, Shard(mesh))
        return empty

    handle = register_module_parameter_registration_hook(forget)  # type: ignore[arg-type]  # it may return another
    try:
        with on_device(spec.precision):
            yield
    finally:
        handle.remove()


@contextmanager
def whole(parameters: Sequence[Parameter]) -> Iterator[None]:
    """Return a context in which the `parameters` of a model that is not yet built into its engine are whole on every
    rank; rank 0's changes to them stay. Collective."""
    held = [(parameter, shard_of(parameter)) for parameter in parameters]
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


def shard_of(parameter: Parameter) -> Shard:
    """Return what this rank holds of a parameter."""
    found: Shard = getattr(parameter, _HERE)
    return found


def materialise(parameter: Parameter, shard: Tensor) -> Parameter:
    """Return a parameter that fully_shard has divided, on the meta device, with this rank's rows in fp32."""
    assert isinstance(parameter, DTensor)
    rows = DTensor.from_local(
        shard, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip
    return Parameter(rows, requires_grad=parameter.requires_grad)
