"""Facts that an engine states for one spec, without torch, and the place of a rank in a layout.

Prediction, advice, rehearsal, readers and reports ask these facts, and never an engine's name or one of its options.
Facts that an engine does not state are unknown: where a cost is unknown, there is no prediction.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bench.core.spec import FULL, WIDTH, Device, Precision, RunSpec

if TYPE_CHECKING:
    from bench.core.engine_costs import EngineMemory, EngineStep, ModelSizes, PipelineCosts
    from bench.core.network import Part, Stacks

Member = Literal[
    "evaluate", "set_learning_rate", "save", "load", "idle_s", "transfer_wait_s", "step_phases_s", "list_passes"
]
"""Those of `bench.engines.OptionalMembers`."""

Layout = Literal["tensor", "pipeline", "stages_per_rank", "sequence"]
"""Fields of `bench.core.spec.Parallel`."""


SUMMED_STEPS = 3
"""First optimizer steps by whose gradient norms a run is verified."""


class Division(NamedTuple):
    """Among how many ranks a state of the model is divided; 1: every rank has all of it."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1

    def state_bytes(self, elements: int, precision: Precision) -> int:
        """Return weights, gradients and AdamW's state of one rank, as Table 1 of ZeRO (arXiv 1910.02054) counts them:
        below fp32 2 + 2 + 12 bytes per parameter, each divided among as many ranks as is said here."""
        width = WIDTH[precision]
        widths = zip(self, (width, width, 2 * FULL + (FULL if width < FULL else 0)), strict=True)
        together: Counter[int] = Counter()
        for ranks, each in widths:
            together[ranks] += each
        return sum(each * elements // ranks for ranks, each in together.items())


class Rehearsal(NamedTuple):
    """Which ranks can be run alone, with collectives that are only pretended."""

    ranks: Literal["any", "first", "none"]
    why: str = ""  # not every one, as a message says it


_NOT_REHEARSED = Rehearsal("none", "its engine does not say that it can")


@dataclass(frozen=True)
class EngineFacts:
    """What an engine says of itself for one spec."""

    label: str  # for a reader, with what tells it from its engine's others: ZeRO stage 2
    distinguishing: frozenset[str] = frozenset()  # options that tell its engines apart, as the stage does ZeRO's
    division: Division | None = None  # None: unknown
    is_reference: bool = False  # nothing stands behind its losses to compare them with
    layouts: frozenset[Layout] = frozenset()  # fields of `parallel` that may be other than one copy on every rank
    loss_ranks: tuple[int, ...] | None = None  # where `train_step` returns a loss; None: on every rank
    cut: "Callable[[RunSpec, Stacks], tuple[Part, ...]] | None" = None
    """All parts of the model, by stage; stage s is on rank s mod `parallel.pipeline` of a pipeline. UserError where the
    model cannot be cut so. None: every rank builds the whole model."""
    rehearsal: Rehearsal = _NOT_REHEARSED
    members: frozenset[Member] = frozenset()  # what it can do that an engine need not
    sums_norms: bool = False
    """Whether `gradient_norm` of the first SUMMED_STEPS steps is of squares that were summed in fp64; verification then
    compares it closely."""
    divides_by_tokens: bool = False  # whether it obeys loss_mean=tokens (bench.engines.distributed.ranks)
    compiled_ops: tuple[
        str, ...
    ] = ()  # what a run loads, in an order in which they can be built (bench.runtime.extensions)
    works_on_host: bool = False  # beside the passes, for so long that no machine's rates tell a step's time well
    deepspeed_config: Callable[[RunSpec], dict[str, Any]] | None = None  # None: the engine is not DeepSpeed's
    memory: "Callable[[RunSpec, ModelSizes, Device, int | None, bool], EngineMemory] | None" = None
    """The engine's part of a rank's memory on a device of so many bytes, None if unknown; the last says whether its
    collectives are only pretended. Raises UserError for what it cannot predict."""
    step: "Callable[[RunSpec, ModelSizes, Device], EngineStep] | None" = None
    """What the engine adds to a step's passes. Raises UserError for what it cannot predict."""
    pipeline: "Callable[[RunSpec, Stacks, Device, bool], PipelineCosts] | None" = None
    """In place of both where the model is cut: the engine's part of the costs by place of a pipeline; the last says
    whether collectives are only pretended. Raises UserError for what it cannot predict."""


class LayoutPosition(NamedTuple):
    """A rank's place in the layout, each from 0."""

    pipeline: int  # which part of the layers
    data: int  # which samples: the ranks of one data-parallel rank get the same
    tensor: int  # which slice of each matrix


def place(spec: RunSpec, rank: int) -> LayoutPosition:
    """Return the place of `rank`, which is below `spec.world_size`."""
    others, tensor = divmod(rank, spec.parallel.tensor)
    pipeline, data = divmod(others, spec.data_parallel)
    return LayoutPosition(pipeline, data, tensor)


def find_rank(spec: RunSpec, here: LayoutPosition) -> int:
    """Return the rank in a place."""
    return (here.pipeline * spec.data_parallel + here.data) * spec.parallel.tensor + here.tensor


def list_stages(spec: RunSpec, rank: int) -> range:
    """Return the numbers of a rank's stages, in the order of forward: stage s is on rank s mod `pipeline` of a copy."""
    parallel = spec.parallel
    return range(place(spec, rank).pipeline, parallel.pipeline * parallel.stages_per_rank, parallel.pipeline)
