"""RunSpec: the measured configuration as one frozen value, with the rules that hold between its parts.

The launcher, partition, time limit, results folder and machine are circumstances, not identity: two runs of one RunSpec
are repeats of each other wherever they ran.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

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
"""Version of the defaults below. `config_id` omits defaults, so none of them changes within a version.

Version 1 had the protocol of `AdaptiveMeasure` and a loss that is a mean of micro-batches. A spec with this protocol is
read with the defaults of version 1 and keeps its config_id."""

Precision = Literal["bf16", "fp16", "fp32"]
Device = Literal["cpu", "cuda"]
Positive = Annotated[int, Field(gt=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=80)]

WIDTH: dict[Precision, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes per element of weights, gradients and activations."""
FULL = 4
"""Bytes per element of fp32: master weights, AdamW's two moments, and operations that always compute in fp32."""


class Frozen(BaseModel):
    """An immutable value. Unknown keys and numbers that are not finite are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)


class Extensible(Frozen):
    """A value with fields that older records lack. Such a field is written only where it differs from its default, so
    that older and newer records of one value are equal."""

    LATER_FIELDS: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _omit_later_defaults(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        plain: dict[str, Any] = serialize(self)
        fields = type(self).model_fields
        usual = {name for name in self.LATER_FIELDS if getattr(self, name) == fields[name].default}
        return {name: value for name, value in plain.items() if name not in usual}


class ModelSpec(Frozen):
    """The model by its shape. `shape` holds the fields of the family's `Shape`. Weights are always random."""

    name: Name
    family: Name = "t5"
    shape: dict[str, Any]
    parameters: Positive | None = Field(None, description="published count, checked before a run; None: unpublished")
    attention: Literal["sdpa", "eager", "flex"] = "sdpa"
    dropout: float = Field(0.0, ge=0, lt=1)
    loss_chunk_tokens: Positive | None = Field(
        None,
        description="number of tokens per chunk of head and loss, to limit live logits; the loss is fp32. None: all "
        "logits at once and the loss in the run's precision, as in transformers",
    )
    compile: Literal["none", "blocks"] = Field("none", description="torch.compile on each block of layers separately")
    source: str = Field("", description="origin of shape and count; not part of the identity")


class EngineSpec(Frozen):
    """The training engine. `backend` names a folder of bench/engines, whose `Options` decode `options`."""

    name: Name
    backend: Name
    options: dict[str, Any] = {}


class DataSpec(Frozen):
    """The data. `source` names a file of bench/data, whose `Options` decode `options`."""

    name: Name
    source: Name
    workers: int = Field(0, ge=0, description="loader processes per rank; 0 loads in the training process")
    prefetch: Positive = Field(2, description="batches each loader process keeps ready; unused without workers")
    pin_memory: bool = False
    options: dict[str, Any] = {}


class Batch(Frozen):
    """Samples per device and forward pass (`micro`), and the number of these passes in an optimizer step.

    Give `accumulation` or `global`. A RunSpec always holds both.
    """

    micro: Positive
    accumulation: Positive | None = None
    global_: Positive | None = Field(None, alias="global")


OBJECTIVE = "span_corruption"
"""The default objective …"""
LENGTHS = {"encoder": 512, "decoder": 128}
"""… and its default tokens per sample, padding included. A spec writes out the lengths of any other objective, so that
`config_id` depends on no plug-in's defaults."""


class Parallel(Frozen):
    """How ranks share one copy of the model. With the defaults every rank has a copy, or its partition under ZeRO."""

    tensor: Positive = Field(1, description="ranks that share each matrix")
    pipeline: Positive = Field(1, description="ranks that the layers are divided among")
    stages_per_rank: Positive = Field(1, description="stages on each of them; above 1: looped, stage % pipeline")
    sequence: bool = Field(False, description="partition activations by tokens between sliced layers (2205.05198)")

    @property
    def ranks(self) -> int:
        """Ranks of one copy of the model: they work on the same samples."""
        return self.tensor * self.pipeline

    @model_validator(mode="after")
    def _sequence_among_ranks(self) -> Self:
        if self.sequence and self.tensor == 1:
            rule = "parallel.sequence=true divides activations among the ranks of parallel.tensor=1"
            raise ValueError(f"{rule}; leave it out, or raise parallel.tensor")
        return self


class OptimizerSpec(Frozen):
    """AdamW. Every value is written out, so that no engine chooses a default of its own."""

    name: Literal["adamw"] = "adamw"
    implementation: Literal["torch", "fused", "native"] = Field(
        "torch",
        description="torch: torch.optim.AdamW in every engine, for comparisons; fused: torch's fused kernel; "
        "native: the engine's own (DeepSpeed's FusedAdam or CPUAdam)",
    )
    lr: float = Field(1e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    gradient_clipping: float = Field(1.0, ge=0, description="global L2 norm; 0: no clipping")


class MeasureSpec(Frozen):
    """The measurement protocol: a warm-up and a window with lengths fixed before the run, in optimizer steps."""

    warmup_steps: Positive = Field(10, description="never measured")
    gpu_warmup_s: float = Field(30.0, ge=0, description="minimum warm-up on a GPU: its clock settles with heat")
    block_steps: Positive = Field(5, description="rank 0 decides after each block whether to continue")
    window_s: float = Field(60.0, ge=0, description="minimum length of the window …")
    min_steps: Positive = Field(30, description="… and its minimum number of steps")
    max_s: float = Field(300.0, gt=0, description="maximum length of the window, which is then flagged `short`")
    inspect: bool = Field(True, description="untimed steps after the window: memory by event, bytes per collective")


class AdaptiveMeasure(MeasureSpec):
    """The protocol of records before version 3, which lack `window_s` and `gpu_warmup_s`.

    A window ended once its median was known well enough, a warm-up once two blocks of steps agreed. This protocol is
    only read; no new run uses it.
    """

    gpu_warmup_s: float = Field(0.0, exclude=True, description="follows from min_s")
    window_s: float = Field(0.0, exclude=True, description="equals min_s")
    warmup_steps: Positive = 5
    warmup_max_steps: Positive = 60
    min_s: float = Field(20.0, ge=0)
    max_steps: Positive = 500
    width: float = Field(0.02, gt=0, description="of the median's 95 % interval, relative to the median")

    @model_validator(mode="after")
    def _derive_seconds(self) -> Self:
        for name, seconds in (("window_s", self.min_s), ("gpu_warmup_s", 1.5 * self.min_s)):
            object.__setattr__(self, name, seconds)  # frozen, but derived fields are set once
        return self


ADAPTIVE_KEYS = AdaptiveMeasure.model_fields.keys() - MeasureSpec.model_fields.keys()
"""Keys that only the older protocol has."""


def read_protocol(plain: Mapping[str, Any]) -> MeasureSpec:
    """Return the protocol of a plain spec, today's or that of an older version."""
    return (MeasureSpec if plain.keys().isdisjoint(ADAPTIVE_KEYS) else AdaptiveMeasure).model_validate(plain)


def _read_older_protocol(given: Any, read: ValidatorFunctionWrapHandler) -> Any:
    if not isinstance(given, Mapping) or given.keys().isdisjoint(ADAPTIVE_KEYS):
        return read(given)
    # The text of a ValidationError has several lines; a message for users has one.
    try:
        return read_protocol(given)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from error


class LearningSpec(Frozen):
    """A training with a fixed number of tokens. Without `tokens`, a run measures a window of steps instead.

    Tokens of all kinds count, padding included. Numbers of tokens are rounded up to whole optimizer steps.
    """

    tokens: Positive | None = Field(None, description="to train on")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="learning rate after warm-up")
    warmup_tokens: int = Field(0, ge=0, description="over which the learning rate rises linearly to optimizer.lr")
    final_lr: float = Field(0.0, ge=0, le=1, description="where linear and cosine end, as a share of optimizer.lr")
    evaluate_every: Positive | None = Field(None, description="tokens between evaluations; None: only at start and end")
    evaluation_samples: Positive = Field(64, description="of the held-out text, the same each time")
    held_out: float = Field(0.05, gt=0, lt=1, description="share of the text held out, in whole documents")
    held_out_seed: int = Field(0, ge=0, description="selects these documents; not `seed`, so that seeds compare")
    checkpoint_every: Positive | None = Field(None, description="tokens between checkpoints; None: no checkpoints")
    stop_after: Positive | None = Field(None, description="tokens after which a run stops, with a checkpoint to resume")

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if self.tokens is None:
            for name, field in type(self).model_fields.items():
                if (value := getattr(self, name)) != field.default:
                    raise ValueError(f"learning.{name}={value} without learning.tokens; set learning.tokens")
            return self
        if self.warmup_tokens >= self.tokens:
            rule = f"learning.warmup_tokens={self.warmup_tokens} is not below learning.tokens={self.tokens}"
            raise ValueError(f"{rule}; lower the first or raise the second")
        if self.final_lr > 0 and self.schedule == "constant":
            rule = f"learning.final_lr={self.final_lr} with learning.schedule=constant, which stays constant"
            raise ValueError(f"{rule}; leave it out, or choose linear or cosine")
        if self.stop_after is not None and self.stop_after >= self.tokens:
            rule = f"learning.stop_after={self.stop_after} is not below learning.tokens={self.tokens}"
            raise ValueError(f"{rule}; leave it out, or lower it")
        return self

    @property
    def end_tokens(self) -> int | None:
        """Number of tokens after which a run ends; None without `tokens`."""
        return self.stop_after or self.tokens


class RunSpec(Extensible):
    """One point of a study: all settings that decide the computation of a run and its measurement."""

    LATER_FIELDS = frozenset({"objective", "parallel", "learning"})

    model: ModelSpec
    engine: EngineSpec
    data: DataSpec
    batch: Batch
    nodes: Positive = 1
    devices_per_node: Positive = 1
    objective: Name = Field(OBJECTIVE, description="a file in bench/objectives")
    sequence: dict[Name, Positive] = Field(LENGTHS, description="tokens per sample by kind, padding included")
    parallel: Parallel = Parallel()
    precision: Precision = "bf16"
    activation_checkpointing: bool = False
    optimizer: OptimizerSpec = OptimizerSpec()
    learning: LearningSpec = LearningSpec()
    loss_mean: Literal["tokens", "micro_batches"] = Field(
        "tokens",
        description="loss of a step: the mean over its target tokens, or over its micro-batches' own means. Both are "
        "equal where every micro-batch has the same number of target tokens",
    )
    seed: int = Field(0, ge=0, lt=2**31)
    measure: Annotated[
        SerializeAsAny[MeasureSpec],
        WrapValidator(_read_older_protocol, json_schema_input_type=MeasureSpec | AdaptiveMeasure),
    ] = MeasureSpec()

    @property
    def is_version_1(self) -> bool:
        """True for the spec of a record before version 3, which has the defaults of version 1."""
        return isinstance(self.measure, AdaptiveMeasure)

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.nodes * self.devices_per_node

    @property
    def data_parallel(self) -> int:
        """Data-parallel ranks: groups of ranks with their own samples."""
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
        """Return the number of optimizer steps for this number of tokens, rounded up."""
        return -(-tokens // self.tokens_per_step)

    @model_validator(mode="before")
    @classmethod
    def _complete_defaults(cls, plain: Any) -> Any:
        """Add default lengths of the default objective, and the default loss_mean of the older protocol."""
        if not isinstance(plain, Mapping):
            return plain
        given, objective, measure = plain.get("sequence", {}), plain.get("objective", OBJECTIVE), plain.get("measure")
        # Before version 3 no record had loss_mean, and all of them had the older protocol.
        has_older_keys = isinstance(measure, Mapping) and not measure.keys().isdisjoint(ADAPTIVE_KEYS)
        if has_older_keys or isinstance(measure, AdaptiveMeasure):
            plain = {"loss_mean": _LOSS_MEAN_1, **plain}
        if objective == OBJECTIVE and isinstance(given, Mapping):
            return {**plain, "sequence": {**LENGTHS, **given}}
        if "sequence" not in plain:
            raise ValueError(f"objective={objective} needs sequence; give the tokens per sample by kind")
        return plain

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        parallel, ranks = self.parallel, self.world_size
        if self.objective == OBJECTIVE and self.sequence.keys() != LENGTHS.keys():
            rule = f"objective={OBJECTIVE} has {', '.join(LENGTHS)}"
            raise ValueError(f"sequence has {', '.join(self.sequence)}; {rule}")
        if self.model.loss_chunk_tokens is not None and self.precision == "fp16":
            # a chunked loss computes its gradients in forward, before the loss scale is known
            value = f"model.loss_chunk_tokens={self.model.loss_chunk_tokens} with precision=fp16"
            rule = "a chunked loss makes its gradients before a loss scale could lift them into fp16's range"
            raise ValueError(f"{value}: {rule}; choose precision=bf16, or leave it out")
        if ranks % parallel.ranks:
            value = f"parallel.tensor={parallel.tensor} × parallel.pipeline={parallel.pipeline}"
            remedy = f"choose a divisor of {ranks}, or a multiple of {parallel.ranks} ranks"
            raise ValueError(f"{value} does not divide {ranks} ranks; {remedy}")
        for kind, length in self.sequence.items():
            if parallel.sequence and length % parallel.tensor:
                rule = f"sequence.{kind}={length} is not divisible by parallel.tensor={parallel.tensor}"
                raise ValueError(f"{rule}; choose a multiple of {parallel.tensor}, or parallel.sequence=false")
        return self

    @model_validator(mode="after")
    def _complete_batch(self) -> Self:
        batch, per_micro_step = self.batch, self.batch.micro * self.data_parallel
        accumulation = batch.accumulation
        if accumulation is None:
            accumulation = 1 if batch.global_ is None else batch.global_ // per_micro_step
        if batch.global_ not in (None, accumulation * per_micro_step) or accumulation < 1:
            ranks = f"{self.data_parallel} {'data-parallel ' * (self.parallel.ranks > 1)}ranks"
            product = f"batch.micro={batch.micro} × accumulation={batch.accumulation or 'any'} × {ranks}"
            remedy = f"choose a multiple of {per_micro_step}, or give only one of batch.global and batch.accumulation"
            raise ValueError(f"batch.global={batch.global_} is not {product}; {remedy}")
        complete = Batch(micro=batch.micro, accumulation=accumulation, global_=accumulation * per_micro_step)
        object.__setattr__(self, "batch", complete)  # frozen, but derived fields are set once
        return self

    @model_validator(mode="after")
    def _measure_to_the_end(self) -> Self:
        """Replace the window of the protocol by the whole training after its shortest warm-up."""
        if self.learning.end_tokens is not None and not self.is_version_1:
            steps = self.count_steps(self.learning.end_tokens)
            warm = max(1, min(self.measure.warmup_steps, steps - 1))
            window = {"warmup_steps": warm, "min_steps": max(1, steps - warm), "gpu_warmup_s": 0.0, "window_s": 0.0}
            measure = self.measure.model_copy(update={**window, "max_s": _ENDLESS_S})
            object.__setattr__(self, "measure", measure)
        return self


_ENDLESS_S = 1e9
"""`max_s` of a window without a time limit; finite, since JSON has no infinity."""
_LOSS_MEAN_1 = "micro_batches"
"""`loss_mean` of all records before version 3, which did not record it."""


def canonical(spec: RunSpec) -> str:
    """Return the JSON text that identifies `spec`: keys sorted, defaults and derived fields omitted."""
    # Defaults are omitted, so that a new field with a default keeps all ids.
    plain = select(spec.model_dump(mode="json", by_alias=True, exclude_defaults=True), "identity")
    if spec.objective == OBJECTIVE and "sequence" in plain:
        plain["sequence"] = {kind: length for kind, length in spec.sequence.items() if LENGTHS.get(kind) != length}
    if not plain.get("measure", True):  # an older protocol with all its defaults
        del plain["measure"]
    if spec.is_version_1:
        plain |= {"loss_mean": spec.loss_mean}
        if spec.loss_mean == _LOSS_MEAN_1:
            del plain["loss_mean"]
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def config_id(spec: RunSpec) -> str:
    """Return the short name under which results folders hold all runs of `spec`: 10 hexadecimal digits."""
    # The version is part of the hash: the same text means another point under other defaults.
    version = 1 if spec.is_version_1 else DEFAULTS_VERSION
    return hashlib.sha256(f"{version}{canonical(spec)}".encode()).hexdigest()[:10]
