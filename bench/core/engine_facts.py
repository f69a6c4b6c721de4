"""Facts that an engine states for one spec, without torch, and the place of a rank in a layout.

Prediction, advice, rehearsal, readers and reports depend on these facts, never on an engine's name or options. A fact
that an engine does not state is unknown; without a known cost there is no prediction.
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
"""Names of the members of `bench.engines.OptionalMembers`."""

Layout = Literal["tensor", "pipeline", "stages_per_rank", "sequence"]
"""Fields of `bench.core.spec.Parallel`."""


SUMMED_STEPS = 3
"""First optimizer steps, whose gradient norms verify a run."""


class Division(NamedTuple):
    """Number of ranks among which each state of the model is partitioned; 1: every rank has all of it."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1

    def state_bytes(self, elements: int, precision: Precision) -> int:
        """Return the bytes of weights, gradients and AdamW's state of one rank, by Table 1 of ZeRO (arXiv 1910.02054).

        Below fp32 these are 2 + 2 + 12 bytes per parameter, each divided by its number of ranks.
        """
        width = WIDTH[precision]
        together: Counter[int] = Counter()  # bytes per parameter by number of ranks: rounded down once for equal ones
        for ranks, each in zip(self, (width, width, 2 * FULL + (FULL if width < FULL else 0)), strict=True):
            together[ranks] += each
        return sum(each * elements // ranks for ranks, each in together.items())


class Rehearsal(NamedTuple):
    """Ranks that can run alone, with simulated collectives."""

    ranks: Literal["any", "first", "none"]
    why: str = ""  # for a message: the reason why not any rank


_NOT_REHEARSED = Rehearsal("none", "its facts state no rehearsal")


@dataclass(frozen=True)
class EngineFacts:
    """Facts of an engine for one spec. Its functions raise UserError for specs that they do not support."""

    label: str  # for a reader, with the engine's variant: ZeRO stage 2
    distinguishing: frozenset[str] = frozenset()  # options that tell variants apart, as the stage does for ZeRO
    division: Division | None = None  # None: unknown
    is_reference: bool = False  # there is no other implementation to verify its losses against
    layouts: frozenset[Layout] = frozenset()  # supported fields of `parallel`, besides a copy on every rank
    loss_ranks: tuple[int, ...] | None = None  # ranks on which `train_step` returns a loss; None: every rank
    cut: "Callable[[RunSpec, Stacks], tuple[Part, ...]] | None" = None
    """Return all parts of the model, by stage; stage s is on rank s mod `parallel.pipeline` of a pipeline. None: every
    rank builds the whole model."""
    rehearsal: Rehearsal = _NOT_REHEARSED
    members: frozenset[Member] = frozenset()  # optional members that this engine has
    sums_norms: bool = False
    """True if `gradient_norm` of the first SUMMED_STEPS steps comes from squares summed in fp64, which verification
    then compares closely."""
    divides_by_tokens: bool = False  # True: it supports loss_mean=tokens (bench.engines.distributed.ranks)
    compiled_ops: tuple[str, ...] = ()  # ops that a run loads, in build order (bench.runtime.extensions)
    works_on_host: bool = False  # host work too long for predictions of step times by a machine's rates
    deepspeed_config: Callable[[RunSpec], dict[str, Any]] | None = None  # None: the engine is not DeepSpeed's
    memory: "Callable[[RunSpec, ModelSizes, Device, int | None, bool], EngineMemory] | None" = None
    """Return the engine's part of a rank's memory. The last arguments are the device's bytes (None: unknown), and True
    for simulated collectives."""
    step: "Callable[[RunSpec, ModelSizes, Device], EngineStep] | None" = None
    """Return the engine's additions to a step's passes."""
    pipeline: "Callable[[RunSpec, Stacks, Device, bool], PipelineCosts] | None" = None
    """Replaces both for a model with `cut`: return the engine's part of the costs by place of a pipeline. The last
    argument is True for simulated collectives."""


class LayoutPosition(NamedTuple):
    """Position of a rank in the layout, each index from 0."""

    pipeline: int  # part of the layers
    data: int  # samples: the ranks of one data-parallel rank get the same
    tensor: int  # slice of each matrix


def place(spec: RunSpec, rank: int) -> LayoutPosition:
    """Return the position of `rank`, which is below `spec.world_size`."""
    # Tensor ranks are neighbours, because they communicate most; pipeline ranks are farthest apart.
    others, tensor = divmod(rank, spec.parallel.tensor)
    pipeline, data = divmod(others, spec.data_parallel)
    return LayoutPosition(pipeline, data, tensor)


def find_rank(spec: RunSpec, here: LayoutPosition) -> int:
    """Return the rank at a position."""
    return (here.pipeline * spec.data_parallel + here.data) * spec.parallel.tensor + here.tensor


def list_stages(spec: RunSpec, rank: int) -> range:
    """Return the numbers of a rank's stages, in the order of forward: stage s is on rank s mod `pipeline` of a copy."""
    parallel = spec.parallel
    return range(place(spec, rank).pipeline, parallel.pipeline * parallel.stages_per_rank, parallel.pipeline)
