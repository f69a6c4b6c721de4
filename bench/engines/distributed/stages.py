"""The stages of one rank as one module: what is built, counted and trained in place of a whole model."""

from collections.abc import Iterator, Mapping, Sequence

from torch.nn import Module, ModuleDict, Parameter

from bench.core.engine_facts import list_stages
from bench.core.network import Part, Stacks
from bench.core.plugins import DividedFamilyBuilder, EngineBuilder
from bench.core.spec import RunSpec
from bench.engines.distributed.slices import TensorRanks, join_tensor_ranks

Shapes = tuple[tuple[int, int, int], ...]
"""Of the tensors between two stages: samples, tokens, width."""


class RankStages(Module):
    """The stages of a rank by number, and what they need to know of the others. A parameter is met once under the name
    that it has in the whole model, also where several stages use it: it is one."""

    def __init__(
        self, stages: Mapping[int, Module], shapes: Shapes, shared: Mapping[str, Sequence[int]],
        among: TensorRanks | None,
    ) -> None:  # fmt: skip
        """`shared`: by name the parameters that several stages of the model have, and which. `among`: those who share
        each matrix with this rank."""
        super().__init__()
        self.stages = ModuleDict({str(number): stage for number, stage in stages.items()})
        self.shapes, self.shared, self.among = shapes, shared, among
        self._unite()

    def _unite(self) -> None:
        """Make one of parameters that stages have under the same name."""
        first: dict[str, Parameter] = {}
        for stage in self.stages.values():
            for name, parameter in list(stage.named_parameters()):
                if first.setdefault(name, parameter) is not parameter:
                    _replace(stage, parameter, first[name])

    @property
    def first(self) -> Module:
        """The first stage in the order of forward; these are called, and never the whole."""
        return next(iter(self.stages.values()))

    def __getitem__(self, number: int) -> Module:
        return self.stages[str(number)]

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        names = set[str]()
        for stage in self.stages.values():
            for name, parameter in stage.named_parameters(prefix, recurse, remove_duplicate):
                if name not in names:
                    names.add(name)
                    yield name, parameter


def _replace(module: Module, old: Parameter, new: Parameter) -> None:
    """Put a parameter in the place of another wherever a module has that."""
    for name, parameter in list(module.named_parameters(remove_duplicate=False)):
        if parameter is old:
            owner, _, own = name.rpartition(".")
            setattr(module.get_submodule(owner), own, new)


def build_stages(
    spec: RunSpec,
    rank: int,
    family: DividedFamilyBuilder,
    engine: EngineBuilder,
    network: Stacks,
    parts: Sequence[Part],
) -> RankStages:
    """Return a rank's stages, uninitialised, of a model that is cut into these parts. Collective."""
    among = join_tensor_ranks(spec, rank)
    sliced = {} if among is None else {"among": among}
    stages = {
        number: family.build_part(spec, parts[number], engine.construction(spec), **sliced)
        for number in list_stages(spec, rank)
    }
    shares = spec.parallel.tensor if spec.parallel.sequence else 1
    shapes = tuple((spec.batch.micro, spec.sequence[stack.tokens] // shares, network.width) for stack in network.stacks)
    return RankStages(stages, shapes, family.find_shared(spec, parts), among)
