"""Facts that an engine declares for one spec, and the position of a rank in a parallel layout.

Code outside the engines uses these facts, and never an engine's name or options. Examples are predictions, advice,
rehearsals (runs of one rank alone) and reports. A fact that an engine does not declare is unknown. If a cost is
unknown, step time and memory are not predicted. This module does not import torch.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from bench.core.spec import FULL, WIDTH, Device, OptimizerName, Precision, RunSpec

if TYPE_CHECKING:
    from bench.core.engine_costs import EngineMemory, EngineStep, ModelSizes, PipelineCosts
    from bench.core.network import Part, Stacks

Member = Literal[
    "evaluate", "predict_tokens", "set_learning_rate", "save", "load", "list_weights", "idle_s", "transfer_wait_s",
    "step_phases_s", "list_passes",
]  # fmt: skip
"""Names of the optional methods of an engine, which `bench.engines.OptionalMembers` defines."""

Layout = Literal["tensor", "pipeline", "stages_per_rank", "sequence"]
"""Names of the fields of `bench.core.spec.Parallel`, which define how ranks share one copy of the model."""


SUMMED_STEPS = 3
"""Number of optimizer steps, counted from the first step, whose gradient norms are used to verify a run."""


SCRATCH = "ZEROSCALE_SCRATCH"
"""Environment variable of every rank. Its value is the name of the run's own folder, which exists within each of the
folders in `EngineFacts.scratch`."""


MOMENTS: dict[OptimizerName, float] = {"adamw": 2 * FULL, "adamw_8bit": 2 + 2 * FULL / 256, "adafactor": 0}
"""Bytes of an optimizer's moments per parameter. In 8 bits, each block of 256 moments has an fp32 scale. Adafactor's
sums by row and column are few enough to be left out."""


class Division(NamedTuple):
    """Number of ranks among which each kind of model state is partitioned. 1 means that every rank has a whole copy."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1

    def state_bytes(self, elements: int, precision: Precision, optimizer: OptimizerName = "adamw") -> int:
        """Return the bytes of weights, gradients and optimizer state on one rank, according to Table 1 of the ZeRO
        paper (arXiv 1910.02054).

        In 16-bit precision a parameter has 2 bytes of weights, 2 of gradients, and with AdamW 12 of optimizer state.
        The bytes of each of the three kinds are divided by the number of ranks among which that kind is partitioned.
        """
        width = WIDTH[precision]
        # Bytes per parameter by number of ranks, so that each sum is rounded once.
        together = defaultdict[int, float](float)
        kinds = (float(width), float(width), MOMENTS[optimizer] + (FULL if width < FULL else 0))
        for ranks, each in zip(self, kinds, strict=True):
            together[ranks] += each
        return sum(int(Fraction(each) * elements // ranks) for ranks, each in together.items())


class Rehearsal(NamedTuple):
    """Rehearsals that an engine supports: of any rank, of the first rank only, or of no rank. A rehearsal runs one rank
    of a job alone, with simulated collectives, to measure memory or computation."""

    ranks: Literal["any", "first", "none"]
    why: str = ""  # reason why not every rank can run alone, for a message


class FrozenWeights(NamedTuple):
    """Values of `adapter.quantization` that an engine supports for frozen weights, such as `nf4`. If `forms` is empty,
    the engine always trains all weights. Such an engine supports neither adapters nor frozen parts."""

    forms: frozenset[str] = frozenset()
    why: str = "facts.py of the engine lists none"  # reason why other forms are not supported, for a message


_NOT_REHEARSED = Rehearsal("none", "facts.py of this engine declares no rehearsal")
_NOT_FROZEN = FrozenWeights()
FROZEN_FORMS = frozenset({"none", "nf4", "int8"})
"""Values of `adapter.quantization` for engines whose ranks hold whole weights."""
WITHOUT_INT8 = FrozenWeights(
    FROZEN_FORMS - {"int8"},
    "bitsandbytes keeps a whole copy of int8 weights on every rank, so that nothing is partitioned",
)
"""Values of `adapter.quantization` for engines that partition weights: all values except int8."""


@dataclass(frozen=True)
class EngineFacts:
    """Facts of an engine for one spec. Fields that are functions raise UserError for a spec that they do not
    support."""

    label: str  # name for reports with the engine's variant, such as ZeRO stage 2
    distinguishing: frozenset[str] = frozenset()  # options that define the variant, such as the stage for ZeRO
    division: Division | None = None  # None: unknown
    is_reference: bool = False  # True: other engines' losses are verified against its losses
    deviates: bool = False  # True: it trains another model than the reference engine by definition, as local SGD does
    layouts: frozenset[Layout] = frozenset()  # fields of `parallel` that may differ from 1 or False
    loss_ranks: tuple[int, ...] | None = None  # ranks on which `train_step` returns a loss; None: every rank
    cut: "Callable[[RunSpec, Stacks], tuple[Part, ...]] | None" = None
    """Function that returns the pipeline parts into which the engine divides the model, in the order of their stages.
    In each pipeline of P = `parallel.pipeline` ranks, stage s is on the rank at position s mod P. None if every rank
    builds the whole model."""
    rehearsal: Rehearsal = _NOT_REHEARSED
    frozen: FrozenWeights = _NOT_FROZEN
    members: frozenset[Member] = frozenset()  # optional members that this engine has
    sums_norms: bool = False
    """True if the engine sums the squares for `gradient_norm` in fp64 in the first SUMMED_STEPS steps. Verification
    then compares these norms with a narrow tolerance."""
    divides_by_tokens: bool = False  # True: it supports loss_mean=tokens (bench.engines.distributed.ranks)
    scratch: frozenset[str] = frozenset()  # folders in which ranks write temporary files, removed with the run's ranks
    compiled_ops: tuple[str, ...] = ()  # ops that a run loads, in build order (bench.runtime.extensions)
    offload: str = ""  # option that moves model states into host memory; empty: all are in device memory
    works_on_host: bool = False  # True: it works too long on the host to predict step times from a CPU's rates
    host_operations: float = 0.0
    """Work of the engine on the host of a GPU in every micro-step: for each trained tensor, the number of operations
    that the host could start in the same time."""
    host_operations_of_update: float = 0.0
    """The same in the last micro-step of a step and in its update, in addition."""
    deepspeed_config: Callable[[RunSpec], dict[str, Any]] | None = None  # None: the engine is not DeepSpeed's
    memory: "Callable[[RunSpec, ModelSizes, Device, int | None, bool], EngineMemory] | None" = None
    """Function that returns the memory that the engine adds to a rank. The last two arguments are the device's memory
    in bytes (None if unknown), and a flag that is True if collectives are simulated. None: the memory is unknown."""
    step: "Callable[[RunSpec, ModelSizes, Device], EngineStep] | None" = None
    """Function that returns the engine's additions to a step of a rank: the elements to update, and the collectives.
    None: unknown."""
    pipeline: "Callable[[RunSpec, Stacks, Device, bool], PipelineCosts] | None" = None
    """Function that returns the costs of the engine at each position of a pipeline. This function replaces `memory` and
    `step` for an engine with `cut`. The last argument is True if collectives are simulated."""


class LayoutPosition(NamedTuple):
    """Position of a rank in the parallel layout, as indices from 0."""

    pipeline: int  # position in the pipeline
    data: int  # data-parallel rank: ranks with the same index get the same samples
    tensor: int  # index of the rank's slice of each matrix


def place(spec: RunSpec, rank: int) -> LayoutPosition:
    """Return the layout position of `rank`, which must be below `spec.world_size`."""
    # Tensor ranks are neighbours, because they communicate most; pipeline ranks are farthest apart.
    others, tensor = divmod(rank, spec.parallel.tensor)
    pipeline, data = divmod(others, spec.data_parallel)
    return LayoutPosition(pipeline, data, tensor)


def find_rank(spec: RunSpec, here: LayoutPosition) -> int:
    """Return the rank at a layout position."""
    return (here.pipeline * spec.data_parallel + here.data) * spec.parallel.tensor + here.tensor


def list_stages(spec: RunSpec, rank: int) -> range:
    """Return the indices of the pipeline stages on a rank, in forward order. Stage s is on rank s mod
    `parallel.pipeline` of a pipeline."""
    parallel = spec.parallel
    return range(place(spec, rank).pipeline, parallel.pipeline * parallel.stages_per_rank, parallel.pipeline)
