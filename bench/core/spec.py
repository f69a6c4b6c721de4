"""RunSpec: *what* is measured, as one frozen value, with the rules that hold between its parts.

How a run is started (launcher, partition, time limit, results folder) and where (the machine) are circumstances,
not identity: two runs of one RunSpec are repeats of each other wherever they ran.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializeAsAny,
    SerializerFunctionWrapHandler,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_serializer,
    model_validator,
)

from bench.core.point_fields import select

DEFAULTS_VERSION = 2
"""Version of the defaults below. `config_id` leaves defaults out, so none of them changes within a version. Version 1
had the protocol of `AdaptiveMeasure` and a loss that is a mean of micro-batches. A spec that still has this protocol
is read with the defaults of version 1, and keeps its config_id."""

Precision = Literal["bf16", "fp16", "fp32"]
Device = Literal["cpu", "cuda"]
Positive = Annotated[int, Field(gt=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=80)]

WIDTH: dict[Precision, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes per element of weights, gradients and activations."""
FULL = 4
"""Bytes per element of fp32: master weights, AdamW's two moments, what is computed in fp32 whatever the precision."""


def _rule(holds: bool, broken: str, remedy: str) -> None:
    if not holds:
        raise ValueError(f"{broken}; {remedy}")


class Frozen(BaseModel):
    """A value: immutable, and with no key that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)


class ModelSpec(Frozen):
    """The model by its shape. `shape` holds the plain fields of the family's `Shape`; weights are always random."""

    name: Name
    family: Name = "t5"
    shape: dict[str, Any]
    parameters: Positive | None = Field(
        None, description="published count, asserted before a run; None for a model of one's own"
    )
    attention: Literal["sdpa", "eager", "flex"] = "sdpa"
    dropout: float = Field(0.0, ge=0, lt=1)
    loss_chunk_tokens: Positive | None = Field(
        None,
        description="head and loss together, so many tokens of a rank at a time: the logits of a large vocabulary "
        "never live at once, and the loss is fp32. None: all logits at once, the loss in the run's "
        "precision, as transformers has it",
    )
    compile: Literal["none", "blocks"] = Field("none", description="by torch.compile, each block of layers by itself")
    source: str = Field("", description="where shape and count come from; not part of the identity")


class EngineSpec(Frozen):
    """The training engine: `backend` names a file in bench/engines, whose `Options` decode `options`."""

    name: Name
    backend: Name
    options: dict[str, Any] = {}


class DataSpec(Frozen):
    """The data: `source` names a file in bench/data, whose `Options` decode `options`."""

    name: Name
    source: Name
    workers: int = Field(0, ge=0, description="loader processes per rank; 0 loads in the training process")
    prefetch: Positive = Field(2, description="batches each loader process keeps ready; unused without workers")
    pin_memory: bool = False
    options: dict[str, Any] = {}


class Batch(Frozen):
    """Samples per device and forward pass, and how many such passes make one optimizer step.

    Give `accumulation` or `global`; a RunSpec always holds both.
    """

    micro: Positive
    accumulation: Positive | None = None
    global_: Positive | None = Field(None, alias="global")


OBJECTIVE = "span_corruption"
"""What is learned where a spec does not say it …"""
LENGTHS = {"encoder": 512, "decoder": 128}
"""… and its tokens per sample, padding included, where a spec leaves one out. Every other objective's are written out
in a spec: `config_id` then depends on no plug-in's defaults."""


class Parallel(Frozen):
    """How ranks share one copy of the model. With ones there is a copy, or a share of ZeRO's, on every rank."""

    tensor: Positive = Field(1, description="ranks that share each matrix")
    pipeline: Positive = Field(1, description="ranks that the layers are divided among")
    stages_per_rank: Positive = Field(
        1, description="parts of the layers on each of them; more: looped placement, stage % pipeline"
    )
    sequence: bool = Field(
        False, description="activations divided by tokens between tensor-parallel regions (arXiv 2205.05198)"
    )

    @property
    def ranks(self) -> int:
        """Ranks of one copy of the model: they work on the same samples."""
        return self.tensor * self.pipeline

    @model_validator(mode="after")
    def _sequence_among_ranks(self) -> Self:
        broken = "parallel.sequence=true divides activations among the ranks of parallel.tensor=1"
        _rule(not self.sequence or self.tensor > 1, broken, "leave it out, or raise parallel.tensor")
        return self


class OptimizerSpec(Frozen):
    """AdamW with everything written out that an engine would otherwise choose silently."""

    name: Literal["adamw"] = "adamw"
    implementation: Literal["torch", "fused", "native"] = Field(
        "torch",
        description="torch: torch.optim.AdamW in every engine, so that engines compare; fused: torch's fused kernel; "
        "native: the engine's own (DeepSpeed's FusedAdam or CPUAdam)",
    )
    lr: float = Field(1e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    gradient_clipping: float = Field(1.0, ge=0, description="global L2 norm; 0 clips nothing")


class MeasureSpec(Frozen):
    """The measurement protocol: a warm-up and a window whose lengths are fixed before the run. Steps are optimizer
    steps."""

    warmup_steps: Positive = Field(10, description="never measured")
    gpu_warmup_s: float = Field(
        30.0, ge=0, description="on a GPU the warm-up takes at least so long: its clock settles with heat"
    )
    block_steps: Positive = Field(5, description="rank 0 decides between blocks whether to go on")
    window_s: float = Field(60.0, ge=0, description="the window lasts at least so long …")
    min_steps: Positive = Field(30, description="… and has at least so many steps")
    max_s: float = Field(300.0, gt=0, description="it ends after so many seconds all the same, flagged `short`")
    inspect: bool = Field(True, description="untimed steps after the window: memory by event, bytes per collective")


class AdaptiveMeasure(MeasureSpec):
    """The protocol of records before version 3, in which `window_s` and `gpu_warmup_s` do not stand. A window ended
    once its median was known well enough, a warm-up once two blocks of steps agreed. It is only read: no run is
    measured by it any more."""

    gpu_warmup_s: float = Field(0.0, exclude=True, description="follows from min_s")
    window_s: float = Field(0.0, exclude=True, description="is min_s")
    warmup_steps: Positive = 5
    warmup_max_steps: Positive = 60
    min_s: float = Field(20.0, ge=0)
    max_steps: Positive = 500
    width: float = Field(0.02, gt=0, description="of the median's 95 % interval, relative to the median")

    @model_validator(mode="after")
    def _derive_seconds(self) -> Self:
        for name, seconds in (("window_s", self.min_s), ("gpu_warmup_s", 1.5 * self.min_s)):
            object.__setattr__(self, name, seconds)  # frozen towards everyone else
        return self


ADAPTIVE_KEYS = AdaptiveMeasure.model_fields.keys() - MeasureSpec.model_fields.keys()
"""Keys of the protocol that windows of a fixed length have no use for."""


def read_protocol(plain: Mapping[str, Any]) -> MeasureSpec:
    """Return the protocol of a plain spec, today's or that of an older version."""
    return (MeasureSpec if plain.keys().isdisjoint(ADAPTIVE_KEYS) else AdaptiveMeasure).model_validate(plain)


def _read_older_protocol(given: Any, read: ValidatorFunctionWrapHandler) -> Any:
    if not isinstance(given, Mapping) or given.keys().isdisjoint(ADAPTIVE_KEYS):
        return read(given)
    try:
        return read_protocol(given)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from error


class LearningSpec(Frozen):
    """What a model learns until its tokens are spent. Without `tokens` it learns nothing to an end, and a window of
    steps is measured instead. Tokens are of all kinds, padding included; what is counted in them is rounded up to whole
    optimizer steps."""

    tokens: Positive | None = Field(None, description="to train on")
    schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="of the learning rate behind its warm-up"
    )
    warmup_tokens: int = Field(0, ge=0, description="over which the learning rate rises in equal parts to optimizer.lr")
    final_lr: float = Field(0.0, ge=0, le=1, description="where linear and cosine end, as a share of optimizer.lr")
    evaluate_every: Positive | None = Field(
        None, description="tokens between evaluations; None: before the first step and after the last"
    )
    evaluation_samples: Positive = Field(64, description="of the held-out text, the same each time")
    held_out: float = Field(
        0.05, gt=0, lt=1, description="share of the text that is only evaluated on, in whole documents"
    )
    held_out_seed: int = Field(
        0, ge=0, description="by which these documents are drawn; not `seed`, so that seeds compare"
    )
    checkpoint_every: Positive | None = Field(None, description="tokens between checkpoints; None: no checkpoints")
    stop_after: Positive | None = Field(
        None,
        description="tokens behind which a run ends with a checkpoint, in the middle of its schedule: another may go "
        "on from there",
    )

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if self.tokens is None:
            for name, field in type(self).model_fields.items():
                value = getattr(self, name)
                _rule(value == field.default, f"learning.{name}={value} without learning.tokens", "say how many tokens")
            return self
        _rule(
            self.warmup_tokens < self.tokens,
            f"learning.warmup_tokens={self.warmup_tokens} is not below learning.tokens={self.tokens}",
            "lower the first or raise the second",
        )
        _rule(
            self.final_lr == 0 or self.schedule != "constant",
            f"learning.final_lr={self.final_lr} with learning.schedule=constant, which ends where it begins",
            "leave it out, or choose linear or cosine",
        )
        _rule(
            self.stop_after is None or self.stop_after < self.tokens,
            f"learning.stop_after={self.stop_after} is not below learning.tokens={self.tokens}",
            "leave it out, or lower it",
        )
        return self

    @property
    def end_tokens(self) -> int | None:
        """Behind how many tokens a run ends: all of them, or where it stops."""
        return self.stop_after or self.tokens


class RunSpec(Frozen):
    """One point of a study: everything that decides what a run computes and how it is measured."""

    model: ModelSpec
    engine: EngineSpec
    data: DataSpec
    batch: Batch
    nodes: Positive = 1
    devices_per_node: Positive = 1
    objective: Name = Field(OBJECTIVE, description="a file in bench/objectives")
    sequence: dict[Name, Positive] = Field(
        LENGTHS, description="tokens per sample by kind, in the objective's order, padding included"
    )
    parallel: Parallel = Parallel()
    precision: Precision = "bf16"
    activation_checkpointing: bool = False
    optimizer: OptimizerSpec = OptimizerSpec()
    learning: LearningSpec = LearningSpec()
    loss_mean: Literal["tokens", "micro_batches"] = Field(
        "tokens",
        description="what a step's loss is a mean of: all its target tokens, or its micro-batches, each the mean of "
        "its own tokens. With as many target tokens in each micro-batch both are the same",
    )
    seed: int = Field(0, ge=0, lt=2**31)
    measure: Annotated[
        SerializeAsAny[MeasureSpec],
        WrapValidator(_read_older_protocol, json_schema_input_type=MeasureSpec | AdaptiveMeasure),
    ] = MeasureSpec()

    @property
    def is_version_1(self) -> bool:
        """Whether the spec is that of a record before version 3, and has the defaults of that time."""
        return isinstance(self.measure, AdaptiveMeasure)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.devices_per_node

    @property
    def data_parallel(self) -> int:
        """Data-parallel ranks: groups of ranks that have samples of their own."""
        return self.world_size // self.parallel.ranks

    @property
    def accumulation(self) -> int:
        """Micro-steps per optimizer step."""
        assert self.batch.accumulation is not None  # _complete_batch
        return self.batch.accumulation

    @property
    def global_batch(self) -> int:
        """Samples per optimizer step over all data-parallel ranks."""
        return self.batch.micro * self.accumulation * self.data_parallel

    @property
    def tokens_per_sample(self) -> int:
        """Tokens of all kinds in a sample, padding included."""
        return sum(self.sequence.values())

    @property
    def tokens_per_step(self) -> int:
        """Tokens of all kinds in an optimizer step, padding included."""
        return self.global_batch * self.tokens_per_sample

    def count_steps(self, tokens: int) -> int:
        """Return the optimizer steps that have so many tokens, the last one whole."""
        return -(-tokens // self.tokens_per_step)

    @model_validator(mode="before")
    @classmethod
    def _complete_sequence(cls, plain: Any) -> Any:
        """Add the lengths that are left out, where this file knows them."""
        if not isinstance(plain, Mapping):
            return plain
        given, objective = plain.get("sequence", {}), plain.get("objective", OBJECTIVE)
        if objective == OBJECTIVE and isinstance(given, Mapping):
            return {**plain, "sequence": {**LENGTHS, **given}}
        missing = f"objective={objective} comes without sequence"
        _rule("sequence" in plain, missing, "give the tokens per sample by kind")
        return plain

    @model_validator(mode="before")
    @classmethod
    def _complete_version_1(cls, plain: Any) -> Any:
        """Add the default of version 1 to a spec with the protocol of version 1."""
        if not isinstance(plain, Mapping) or "loss_mean" in plain:
            return plain
        measure = plain.get("measure")
        is_older = isinstance(measure, AdaptiveMeasure) or (
            isinstance(measure, Mapping) and not measure.keys().isdisjoint(ADAPTIVE_KEYS)
        )
        return {**plain, "loss_mean": _LOSS_MEAN_1} if is_older else plain

    @model_validator(mode="after")
    def _known_sequence(self) -> Self:
        _rule(
            self.objective != OBJECTIVE or self.sequence.keys() == LENGTHS.keys(),
            f"sequence has {', '.join(self.sequence)}",
            f"objective={OBJECTIVE} has {', '.join(LENGTHS)}",
        )
        return self

    @model_serializer(mode="wrap")
    def _without_the_usual(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out what was added after the first records, where it is as it was in all of them."""
        plain: dict[str, Any] = dump(self)
        usual = {name for name, first in _LATER.items() if getattr(self, name) == first}
        return {name: value for name, value in plain.items() if name not in usual}

    @model_validator(mode="after")
    def _loss_in_range(self) -> Self:
        _rule(
            self.model.loss_chunk_tokens is None or self.precision != "fp16",
            f"model.loss_chunk_tokens={self.model.loss_chunk_tokens} with precision=fp16: a chunked loss makes its "
            "gradients before a loss scale could lift them into fp16's range",
            "choose precision=bf16, or leave it out",
        )
        return self

    @model_validator(mode="after")
    def _whole_copies(self) -> Self:
        parallel, ranks = self.parallel, self.world_size
        _rule(
            ranks % parallel.ranks == 0,
            f"parallel.tensor={parallel.tensor} × parallel.pipeline={parallel.pipeline} does not divide {ranks} ranks",
            f"choose a divisor of {ranks}, or a multiple of {parallel.ranks} ranks",
        )
        for kind, length in self.sequence.items():
            _rule(
                not parallel.sequence or length % parallel.tensor == 0,
                f"sequence.{kind}={length} is not divided by parallel.tensor={parallel.tensor}",
                f"choose a multiple of {parallel.tensor}, or parallel.sequence=false",
            )
        return self

    @model_validator(mode="after")
    def _complete_batch(self) -> Self:
        batch, per_micro_step = self.batch, self.batch.micro * self.data_parallel
        accumulation = batch.accumulation
        if accumulation is None:
            accumulation = 1 if batch.global_ is None else batch.global_ // per_micro_step
        _rule(
            batch.global_ in (None, accumulation * per_micro_step) and accumulation > 0,
            f"batch.global={batch.global_} is not batch.micro={batch.micro} × accumulation="
            f"{batch.accumulation or 'any'} × {self.data_parallel} {'data-parallel ' * (self.parallel.ranks > 1)}ranks",
            f"choose a multiple of {per_micro_step}, or give only one of batch.global and batch.accumulation",
        )
        complete = Batch(micro=batch.micro, accumulation=accumulation, global_=accumulation * per_micro_step)
        object.__setattr__(self, "batch", complete)  # frozen towards everyone else
        return self

    @model_validator(mode="after")
    def _measure_to_the_end(self) -> Self:
        """Make a training its own window, whatever the protocol says: all its steps after the fewest of a warm-up."""
        if self.learning.end_tokens is not None and not self.is_version_1:
            steps = self.count_steps(self.learning.end_tokens)
            warm = max(1, min(self.measure.warmup_steps, steps - 1))
            window = {"warmup_steps": warm, "min_steps": max(1, steps - warm), "gpu_warmup_s": 0.0, "window_s": 0.0}
            measure = self.measure.model_copy(update={**window, "max_s": _ENDLESS_S})
            object.__setattr__(self, "measure", measure)
        return self


_ENDLESS_S = 1e9
"""Of a window that no time ends."""
_LATER: dict[str, Any] = {
    "objective": OBJECTIVE,
    "parallel": Parallel(),
    "learning": LearningSpec(),
}
"""Fields that came after the first records, with the value that all of those had."""
_LOSS_MEAN_1 = "micro_batches"
"""`loss_mean` of all records before version 3, which did not write it down."""


def canonical(spec: RunSpec) -> str:
    """Return the JSON text that identifies `spec`: sorted, defaults and derived fields left out."""
    plain = select(spec.model_dump(mode="json", by_alias=True, exclude_defaults=True), "identity")
    if spec.objective == OBJECTIVE and "sequence" in plain:
        plain["sequence"] = {kind: length for kind, length in spec.sequence.items() if LENGTHS.get(kind) != length}
    if not plain.get("measure", True):  # of an older protocol, all by its defaults
        del plain["measure"]
    if spec.is_version_1:
        plain |= {"loss_mean": spec.loss_mean}
        if spec.loss_mean == _LOSS_MEAN_1:
            del plain["loss_mean"]
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def config_id(spec: RunSpec) -> str:
    """Return the short name under which all runs of `spec` are found: 10 hexadecimal digits."""
    version = 1 if spec.is_version_1 else DEFAULTS_VERSION
    return hashlib.sha256(f"{version}{canonical(spec)}".encode()).hexdigest()[:10]
