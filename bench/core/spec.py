"""RunSpec: the complete configuration of a measured run as one frozen value, with rules between its fields.

Launcher, Slurm partition, time limit, results folder and machine are not part of it: they are circumstances of a run.
Two runs of one RunSpec are therefore repeats of each other, even on different machines.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import pydantic
from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator

from bench.core.field_errors import build_error
from bench.core.point_fields import select

DEFAULTS_VERSION = 2
"""Version of the default values in this module. `config_id` is a hash of the values that differ from their defaults, so
a changed default needs a new version. In version 1, the measurement protocol was `AdaptiveMeasure`, and the loss was a
mean over micro-batches. A spec with that protocol keeps the defaults of version 1, and so its config_id."""

Precision = Literal["bf16", "fp16", "fp32"]
Device = Literal["cpu", "cuda"]
OptimizerName = Literal["adamw", "adamw_8bit", "adafactor"]
Positive = Annotated[int, Field(gt=0)]
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=80)]

WIDTH: dict[Precision, int] = {"bf16": 2, "fp16": 2, "fp32": 4}
"""Bytes per element of weights, gradients and activations."""
FULL = 4
"""Bytes per element of fp32. Master weights, AdamW's two moments and some operations are always in fp32."""


class Frozen(BaseModel):
    """An immutable pydantic model. Unknown keys and numbers that are not finite raise a ValidationError."""

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True, allow_inf_nan=False)


class Extensible(Frozen):
    """A pydantic model whose `LATER_FIELDS` were added after the first records had been written. Such a field is
    written only if it differs from its default, so that equal values have equal text in older and newer records."""

    LATER_FIELDS: ClassVar[frozenset[str]] = frozenset()

    @model_serializer(mode="wrap")
    def _omit_later_defaults(self, serialize: pydantic.SerializerFunctionWrapHandler) -> dict[str, Any]:
        plain: dict[str, Any] = serialize(self)
        for name in self.LATER_FIELDS:
            if getattr(self, name) == type(self).model_fields[name].default:
                plain.pop(name, None)
        return plain


class ModelSpec(Extensible):
    """The model, defined by its sizes. `shape` has the fields of the class `Shape` of the model's family."""

    LATER_FIELDS = frozenset({"checkpoint"})

    name: Name = Field(description="name of the model in tables and records")
    family: Name = Field("t5", description="architecture: a folder of bench/models, such as t5 or gpt")
    shape: dict[str, Any]
    parameters: Positive | None = Field(None, description="published number of parameters, checked before a run")
    attention: Literal["sdpa", "eager", "flex"] = Field("sdpa", description="attention implementation in torch")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout rate of the model")
    loss_chunk_tokens: Positive | None = Field(
        None,
        description="head and loss are computed in chunks of this many tokens, in fp32, so that few logits are in "
        "memory. None: all logits at once, and the loss in the run's precision, as in transformers",
    )
    compile: Literal["none", "blocks"] = Field("none", description="blocks: torch.compile on each block of layers")
    checkpoint: str | None = Field(None, description="weights: a folder, or NAME[@REVISION] on the Hub; None: random")
    source: str = Field("", description="publication that states shape and parameter count; not part of config_id")


class EngineSpec(Frozen):
    """The training engine. `backend` is the name of a folder of bench/engines. Its class `Options` validates
    `options`."""

    name: Name = Field(description="name of the engine in tables and records")
    backend: Name = Field(description="implementation: a folder of bench/engines, such as deepspeed or fsdp")
    options: dict[str, Any] = {}


class DataSpec(Frozen):
    """The training data. `source` is the name of a file of bench/data. Its class `Options` validates `options`."""

    name: Name = Field(description="name of the data in tables and records")
    source: Name = Field(description="implementation: a file of bench/data, such as text")
    workers: int = Field(0, ge=0, description="loader processes per rank; 0: load in the training process")
    prefetch: Positive = Field(2, description="micro-batches that each loader process keeps ready")
    pin_memory: bool = Field(False, description="batches are in page-locked host memory, for overlapped copies")
    options: dict[str, Any] = {}


class Batch(Frozen):
    """Batch sizes. `micro` is samples per rank and forward pass, `accumulation` is forward passes per optimizer step,
    and `global` is samples per optimizer step. Give `accumulation` or `global`; the other one is computed. Without
    either, `accumulation` is 1. In a RunSpec, both are set."""

    micro: Positive
    accumulation: Positive | None = None
    global_: Positive | None = Field(None, alias="global")


OBJECTIVE = "span_corruption"  # the default objective
LENGTHS = {"encoder": 512, "decoder": 128}
"""Default sequence lengths of the default objective: tokens per sample, padding included. For any other objective, a
spec must state all lengths, so that `config_id` does not depend on the defaults of a plug-in."""


class Parallel(Frozen):
    """Parallel layout: how ranks share one copy of the model. By default, every rank has a whole copy of the model or,
    under ZeRO, a partition of it."""

    tensor: Positive = Field(1, description="number of ranks that divide each matrix among themselves")
    pipeline: Positive = Field(1, description="number of ranks that divide the layers among themselves")
    stages_per_rank: Positive = Field(1, description="pipeline stages on each rank; stage s is on rank s % pipeline")
    sequence: bool = Field(False, description="sequence parallelism between tensor-parallel layers (arXiv 2205.05198)")

    @property
    def ranks(self) -> int:
        """Number of ranks that share one copy of the model and process the same samples."""
        return self.tensor * self.pipeline

    @model_validator(mode="after")
    def _sequence_among_ranks(self) -> Self:
        if self.sequence and self.tensor == 1:
            rule = "it divides activations among tensor-parallel ranks, but parallel.tensor=1"
            raise ValueError(f"parallel.sequence=true: {rule}; remove it, or set parallel.tensor=2 or more")
        return self


class OptimizerSpec(Frozen):
    """The optimizer. A spec contains every hyperparameter except the constants of Adafactor's paper, so that engines
    never use defaults of their own."""

    name: OptimizerName = Field(
        "adamw",
        description="adamw_8bit: AdamW with moments in 8 bits (bitsandbytes, arXiv 2110.02861); adafactor: no first "
        "moment, second moments as sums by row and column (transformers, arXiv 1804.04235)",
    )
    implementation: Literal["torch", "fused", "native"] = Field(
        "torch",
        description="torch: torch.optim.AdamW, the same in every engine; fused: torch's fused kernel; native: the "
        "engine's own implementation (DeepSpeed's FusedAdam or CPUAdam)",
    )
    lr: float = Field(1e-4, gt=0)
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    gradient_clipping: float = Field(1.0, ge=0, description="maximum global L2 norm; 0: no clipping")

    @model_validator(mode="after")
    def _fits_the_method(self) -> Self:
        unused = {"adamw": (), "adamw_8bit": ("implementation",), "adafactor": ("implementation", "betas", "eps")}
        for name in unused[self.name]:
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                rule = f"optimizer.name={self.name} does not use this setting"
                raise ValueError(f"optimizer.{name}={value}: {rule}; remove it, or set optimizer.name=adamw")
        return self


class MeasureSpec(Frozen):
    """The measurement protocol: an unmeasured warm-up, then the measurement window. The limits of both are fixed before
    the run."""

    warmup_steps: Positive = Field(10, description="minimum number of warm-up steps before the measurement window")
    gpu_warmup_s: float = Field(30.0, ge=0, description="minimum seconds of warm-up on a GPU; heat changes its clock")
    block_steps: Positive = Field(5, description="steps per block; rank 0 decides between blocks whether to end")
    window_s: float = Field(60.0, ge=0, description="minimum seconds of the measurement window")
    min_steps: Positive = Field(30, description="minimum number of steps in the measurement window")
    max_s: float = Field(300.0, gt=0, description="maximum seconds of the window, which is then flagged `short`")
    inspect: bool = Field(True, description="run untimed steps after the window to record memory and communication")


class AdaptiveMeasure(MeasureSpec):
    """The measurement protocol of records before version 3, which lack `window_s` and `gpu_warmup_s`. Its lengths were
    not fixed. The warm-up ended when two blocks of steps agreed. The window ended when the 95 % interval of the median
    step time was narrow enough. New runs cannot use this protocol; it is only read from records."""

    gpu_warmup_s: float = Field(0.0, exclude=True, description="1.5 × min_s")
    window_s: float = Field(0.0, exclude=True, description="equals min_s")
    warmup_steps: Positive = 5
    warmup_max_steps: Positive = 60
    min_s: float = Field(20.0, ge=0)
    max_steps: Positive = 500
    width: float = Field(0.02, gt=0, description="width of the median's 95 % interval, relative to the median")

    @model_validator(mode="after")
    def _derive_seconds(self) -> Self:
        for name, seconds in (("window_s", self.min_s), ("gpu_warmup_s", 1.5 * self.min_s)):
            object.__setattr__(self, name, seconds)  # frozen, but derived fields are set once
        return self


ADAPTIVE_KEYS = AdaptiveMeasure.model_fields.keys() - MeasureSpec.model_fields.keys()
"""Keys of `AdaptiveMeasure` that `MeasureSpec` does not have."""


def read_protocol(plain: Mapping[str, Any]) -> MeasureSpec:
    """Return the measurement protocol from plain values: an AdaptiveMeasure if any of ADAPTIVE_KEYS is present,
    otherwise a MeasureSpec."""
    return (MeasureSpec if plain.keys().isdisjoint(ADAPTIVE_KEYS) else AdaptiveMeasure).model_validate(plain)


def _read_older_protocol(given: Any, read: pydantic.ValidatorFunctionWrapHandler) -> Any:
    if not isinstance(given, Mapping) or given.keys().isdisjoint(ADAPTIVE_KEYS):
        return read(given)
    # Raise the first message only: a ValidationError has several lines, and a message for users has one.
    try:
        return read_protocol(given)
    except pydantic.ValidationError as error:
        raise ValueError(str(build_error(error, AdaptiveMeasure))) from error


class AdapterSpec(Frozen):
    """The trained part of the model. By default, this is the whole model. It can also be low-rank adapters (LoRA, arXiv
    2106.09685) on frozen weights, or all parameters outside a frozen part."""

    name: Name = Field("none", description="name of the adapter in tables and records")
    rank: Positive | None = Field(None, description="inner size of each adapter's two matrices; None: no adapters")
    alpha: float = Field(16.0, gt=0, description="an adapter's output is multiplied by alpha / rank")
    dropout: float = Field(0.0, ge=0, lt=1, description="dropout rate of an adapter's input")
    targets: tuple[Name, ...] = Field((), description="matrices with an adapter, such as [q, v]; empty: all in blocks")
    quantization: Literal["none", "nf4", "int8"] = Field("none", description="format of frozen matrices (bitsandbytes)")
    double_quantization: bool = Field(False, description="quantise the scales of nf4, too (arXiv 2305.14314)")
    frozen: str = Field("", description="regular expression for the names of parameters that are not trained")

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        targets = self.targets and f"[{', '.join(self.targets)}]"  # as in YAML
        given = {"targets": targets, "quantization": self.quantization.removeprefix("none"), "dropout": self.dropout}
        for name, value in ((name, value) for name, value in given.items() if value and self.rank is None):
            rule = f"adapter.{name}={value}: there are no adapters without adapter.rank"
            raise ValueError(f"{rule}; set adapter.rank=16, or choose adapter=lora")
        if self.quantization == "int8":  # it has no scales to quantise, and adapter=qlora sets the field for nf4
            object.__setattr__(self, "double_quantization", False)
        if self.double_quantization and self.quantization != "nf4":
            rule = f"it needs nf4, and adapter.quantization={self.quantization}"
            raise ValueError(f"adapter.double_quantization=true: {rule}; set adapter.quantization=nf4")
        if self.frozen and self.rank is not None:
            rule = f"adapter.rank={self.rank} already freezes all weights except adapters"
            raise ValueError(f"adapter.frozen={self.frozen}: {rule}; set only one of the two")
        return self


class LearningSpec(Extensible):
    """A training on a fixed number of tokens. If `tokens` is None, the run measures a window of steps instead. Numbers
    of tokens include all kinds of tokens and padding. Each number is rounded up to whole optimizer steps."""

    LATER_FIELDS = frozenset({"save_model", "quality", "answer_tokens"})

    tokens: Positive | None = Field(None, description="number of tokens to train on; None: only steps are measured")
    schedule: Literal["constant", "linear", "cosine"] = Field("constant", description="learning rate after its warm-up")
    warmup_tokens: int = Field(0, ge=0, description="tokens over which the learning rate rises to optimizer.lr")
    final_lr: float = Field(0.0, ge=0, le=1, description="final rate of linear and cosine, as a share of optimizer.lr")
    evaluate_every: Positive | None = Field(None, description="tokens between evaluations; None: only at start and end")
    evaluation_samples: Positive = Field(64, description="held-out samples in each evaluation, always the same")
    held_out: float = Field(0.05, gt=0, lt=1, description="share of documents that are only used for evaluation")
    held_out_seed: int = Field(0, ge=0, description="random seed that selects the held-out documents")
    quality: tuple[str, ...] = Field((), description="quality measures: exact_match, token_f1, or your module:function")
    answer_tokens: Positive | None = Field(None, description="maximum tokens of an answer; None: the longest reference")
    checkpoint_every: Positive | None = Field(None, description="tokens between checkpoints; None: no checkpoints")
    stop_after: Positive | None = Field(None, description="tokens after which the run ends early, with a checkpoint")
    save_model: bool = Field(False, description="write the trained model (transformers) or adapters (peft) at the end")

    @model_validator(mode="after")
    def _has_an_end(self) -> Self:
        if self.tokens is None:
            for name, field in type(self).model_fields.items():
                if (value := getattr(self, name)) != field.default:
                    raise ValueError(f"learning.{name}={value} needs learning.tokens; set learning.tokens")
            return self
        above, is_constant = f"must be below learning.tokens={self.tokens}; lower it", self.schedule == "constant"
        rules = (
            ("answer_tokens", self.answer_tokens and not self.quality, "needs learning.quality; set learning.quality"),
            ("warmup_tokens", self.warmup_tokens >= self.tokens, above),
            ("final_lr", self.final_lr and is_constant, "has no effect with learning.schedule=constant; remove it"),
            ("stop_after", (self.stop_after or 0) >= self.tokens, f"{above}, or remove it"),
        )
        for name, rule in ((name, rule) for name, is_broken, rule in rules if is_broken):
            raise ValueError(f"learning.{name}={getattr(self, name)} {rule}")
        return self

    @property
    def end_tokens(self) -> int | None:
        """Number of tokens after which a run ends; None if `tokens` is None."""
        return self.stop_after or self.tokens


class RunSpec(Extensible):
    """One point (configuration) of a study: all settings that determine a run's computation and its measurement."""

    LATER_FIELDS = frozenset({"objective", "parallel", "learning", "adapter"})

    model: ModelSpec
    engine: EngineSpec
    data: DataSpec
    batch: Batch
    nodes: Positive = 1
    devices_per_node: Positive = 1
    objective: Name = Field(OBJECTIVE, description="training objective: a file of bench/objectives")
    sequence: dict[Name, Positive] = Field(LENGTHS, description="tokens per sample by kind of tokens, padding included")
    parallel: Parallel = Parallel()
    precision: Precision = "bf16"
    activation_checkpointing: bool = False
    optimizer: OptimizerSpec = OptimizerSpec()
    adapter: AdapterSpec = AdapterSpec()
    learning: LearningSpec = LearningSpec()
    loss_mean: Literal["tokens", "micro_batches"] = Field(
        "tokens", description="loss of a step: mean over its target tokens, or mean of its micro-batches' means"
    )
    seed: int = Field(0, ge=0, lt=2**31)
    measure: Annotated[
        pydantic.SerializeAsAny[MeasureSpec],
        pydantic.WrapValidator(_read_older_protocol, json_schema_input_type=MeasureSpec | AdaptiveMeasure),
    ] = MeasureSpec()

    @property
    def has_version_1_defaults(self) -> bool:
        """True if version 1 of the default values applies: the spec is from a record with schema version 1 or 2."""
        return isinstance(self.measure, AdaptiveMeasure)

    @property
    def world_size(self) -> int:
        """Number of all ranks."""
        return self.nodes * self.devices_per_node

    @property
    def data_parallel(self) -> int:
        """Number of copies of the model. Ranks that share a copy process the same samples; other ranks do not."""
        return self.world_size // self.parallel.ranks

    @property
    def accumulation(self) -> int:
        """Number of micro-steps per optimizer step."""
        assert self.batch.accumulation is not None  # set by `_complete_batch`
        return self.batch.accumulation

    @property
    def global_batch(self) -> int:
        """Number of samples per optimizer step over all data-parallel ranks."""
        return self.batch.micro * self.accumulation * self.data_parallel

    @property
    def tokens_per_sample(self) -> int:
        """Number of tokens per sample over all kinds, padding included."""
        return sum(self.sequence.values())

    @property
    def tokens_per_step(self) -> int:
        """Number of tokens per optimizer step over all kinds, padding included."""
        return self.global_batch * self.tokens_per_sample

    def count_steps(self, tokens: int) -> int:
        """Return the number of optimizer steps that process `tokens` tokens, rounded up."""
        return -(-tokens // self.tokens_per_step)

    @model_validator(mode="before")
    @classmethod
    def _complete_defaults(cls, plain: Any) -> Any:
        """Add missing sequence lengths if the objective is the default objective. If the protocol is AdaptiveMeasure
        (from a record with schema version 1 or 2), also add `loss_mean`, which had a fixed value in these versions."""
        if not isinstance(plain, Mapping):
            return plain
        given, objective, measure = plain.get("sequence", {}), plain.get("objective", OBJECTIVE), plain.get("measure")
        # Records before version 3 have the older protocol and no loss_mean.
        has_older_keys = isinstance(measure, Mapping) and not measure.keys().isdisjoint(ADAPTIVE_KEYS)
        if has_older_keys or isinstance(measure, AdaptiveMeasure):
            plain = {"loss_mean": _LOSS_MEAN_1, **plain}
        if objective == OBJECTIVE and isinstance(given, Mapping):
            return {**plain, "sequence": {**LENGTHS, **given}}
        if "sequence" not in plain:
            raise ValueError(f"objective={objective} needs sequence; set sequence.KIND=N for each kind of tokens")
        return plain

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        parallel, ranks = self.parallel, self.world_size
        if self.objective == OBJECTIVE and self.sequence.keys() != LENGTHS.keys():
            needed = ", ".join(LENGTHS)
            raise ValueError(f"sequence has {', '.join(self.sequence)}, but objective={OBJECTIVE} needs {needed}")
        if self.model.loss_chunk_tokens is not None and self.precision == "fp16":
            # A chunked loss computes its gradients in the forward pass, before the loss scale is applied.
            value = f"model.loss_chunk_tokens={self.model.loss_chunk_tokens} with precision=fp16"
            rule = "a chunked loss computes its gradients before the loss scale is applied"
            raise ValueError(f"{value}: {rule}; set precision=bf16, or remove model.loss_chunk_tokens")
        if ranks % parallel.ranks:
            value = f"parallel.tensor={parallel.tensor} × parallel.pipeline={parallel.pipeline}"
            remedy = f"set a divisor of {ranks}, or use a multiple of {parallel.ranks} ranks"
            raise ValueError(f"{value}: does not divide the {ranks} ranks; {remedy}")
        for kind, length in self.sequence.items():
            if parallel.sequence and length % parallel.tensor:
                rule = f"sequence.{kind}={length}: is not divisible by parallel.tensor={parallel.tensor}"
                raise ValueError(f"{rule}; set a multiple of {parallel.tensor}, or parallel.sequence=false")
        return self

    @model_validator(mode="after")
    def _complete_batch(self) -> Self:
        batch, per_micro_step = self.batch, self.batch.micro * self.data_parallel
        accumulation = batch.accumulation or (1 if batch.global_ is None else batch.global_ // per_micro_step)
        if batch.global_ not in (None, accumulation * per_micro_step) or accumulation < 1:
            ranks = f"{self.data_parallel} {'data-parallel ' * (self.parallel.ranks > 1)}ranks"
            product = f"batch.micro={batch.micro} × accumulation={batch.accumulation or 'any'} × {ranks}"
            remedy = f"set a multiple of {per_micro_step}, or only one of batch.global and batch.accumulation"
            raise ValueError(f"batch.global={batch.global_} is not {product}; {remedy}")
        complete = Batch(micro=batch.micro, accumulation=accumulation, global_=accumulation * per_micro_step)
        object.__setattr__(self, "batch", complete)  # frozen, but derived fields are set once
        return self

    @model_validator(mode="after")
    def _measure_to_the_end(self) -> Self:
        """For a run with `learning.tokens`, set the window to all steps after the warm-up, and limit the warm-up to
        `warmup_steps`."""
        if self.learning.end_tokens is not None and not self.has_version_1_defaults:
            steps = self.count_steps(self.learning.end_tokens)
            warm = max(1, min(self.measure.warmup_steps, steps - 1))
            window = {"warmup_steps": warm, "min_steps": max(1, steps - warm), "gpu_warmup_s": 0.0, "window_s": 0.0}
            object.__setattr__(self, "measure", self.measure.model_copy(update={**window, "max_s": _ENDLESS_S}))
        return self


_ENDLESS_S = 1e9
"""Seconds that stand for a window without a time limit. The value is finite because JSON has no infinity."""
_LOSS_MEAN_1 = "micro_batches"
"""Value of `loss_mean` for all records before version 3, which do not contain it."""


def canonical(spec: RunSpec) -> str:
    """Return the JSON text of `spec` that `config_id` hashes. Keys are sorted; defaults and derived fields are
    omitted."""
    # Defaults are omitted, so that a new field with a default does not change existing ids.
    plain = select(spec.model_dump(mode="json", by_alias=True, exclude_defaults=True), "identity")
    if spec.objective == OBJECTIVE and "sequence" in plain:
        plain["sequence"] = {kind: length for kind, length in spec.sequence.items() if LENGTHS.get(kind) != length}
    if not plain.get("measure", True):  # the older protocol with all of its defaults
        del plain["measure"]
    if spec.has_version_1_defaults:
        plain.pop("loss_mean", None)
        plain |= {} if spec.loss_mean == _LOSS_MEAN_1 else {"loss_mean": spec.loss_mean}
    return json.dumps(plain, sort_keys=True, separators=(",", ":"))


def config_id(spec: RunSpec) -> str:
    """Return the identifier of `spec`, 10 hexadecimal digits of a hash, which is the name of the folder of its runs."""
    # The version is part of the hash, because the same text is a different point under other defaults.
    version = 1 if spec.has_version_1_defaults else DEFAULTS_VERSION
    return hashlib.sha256(f"{version}{canonical(spec)}".encode()).hexdigest()[:10]
