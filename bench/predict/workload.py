"""The workload of a run: its network, its tokens by kind, the training software, and the costs that its engine adds."""

import dataclasses
import functools
from typing import Literal, NamedTuple

from bench import engines, models, objectives
from bench.core.adapted import check_targets, read_adapter
from bench.core.engine_costs import EngineMemory, EngineStep, ModelSizes, PipelineCosts, Transfer
from bench.core.errors import NoPrediction, UserError, suggest_nearest
from bench.core.network import (
    Attention,
    Mlp,
    Stacks,
    count_parameters,
    count_trained_parameters,
    list_modules,
    list_named_matrices,
    list_part_matrices,
    list_tensors,
    units,
)
from bench.core.spec import WIDTH, AdapterSpec, Batch, Device, RunSpec


class Software(NamedTuple):
    """Class of training software. Classes differ in how much the kernels of the software are optimized.

    The class determines the operations of a block, the host's time to start an operation, and the uncertainty of
    predicted step times. The uncertainty comes from a comparison of predictions with published step times. If the
    machine was calibrated, the calibration replaces the fields `start_s`, `pace` and `interval`.
    """

    name: str = "usual"
    fused: bool = False  # hand-written kernels: all operations between two products are one kernel
    started_unfused: bool = False  # the host still starts as many operations as without fused kernels
    last_again: bool = True  # with checkpointing, the last stage of a pipeline recomputes its blocks as well
    start_s: float = 22.5e-6  # host's seconds to start one operation
    pace: float = 1.0  # ratio of the time of a pass to the time of its work at the machine's rates
    interval: tuple[float, float] = (0.75, 1.35)  # ratio of true to predicted computing time, for nine of ten steps


USUAL = Software()
"""Default class of software: FSDP and similar software, neither tuned nor old.

The `interval` of this class contained 89 to 90 % of the published step times of decoders. For this test, the steps of
each publication were predicted with constants that had been chosen on the other publications only. An operation of a
Python module takes the host 10 to 35 µs, depending on the processor; the launch alone takes 5 µs. `start_s` is the
middle of this range. It cannot be determined from the published steps, because the host limits none of them.
"""
EAGER = Software("eager", start_s=30e-6, pace=1.25, interval=(0.78, 1.3))
"""Class of software that is little optimised, such as software of 2021.

Its `pace`, a factor on predicted times, is the geometric mean over two sources: DeepSpeed 0.14 on 8 A800, and BLOOM's
trials of Megatron-DeepSpeed. The host's time per operation was chosen on traces of PyTorch modules
(analysis.validation.published_times).
"""
FUSED = Software("fused", fused=True, pace=0.955, interval=(0.82, 1.22))
"""Class of software tuned by its makers, with hand-written kernels. Its `pace`, a factor on predicted times, is the
geometric mean over three sources of NVIDIA: T5-3B and mT5-3B by NeMo, GPT by Megatron (arXiv 2205.05198)."""
SOFTWARE = {software.name: software for software in (EAGER, USUAL, FUSED)}
OWN = USUAL
"""Class of software of this project's engines."""


def find_software(name: str) -> Software:
    """Return the class (category) of training software with this name: `eager`, `usual` or `fused`. Classes differ in
    how well the kernels are optimised. Raise UserError if there is no such class."""
    if name not in SOFTWARE:
        raise UserError(f"software={name}", "no such class of software", suggest_nearest(name, SOFTWARE))
    return SOFTWARE[name]


def format_class(software: Software) -> str:
    """Return a sentence for the user about the uncertainty interval of a predicted step time. The sentence names the
    class (category) of training software for which this interval was determined. The sentence is true only for step
    times that are predicted without a calibration."""
    if software.name == USUAL.name:
        return "The interval is for unknown software; set software=eager or software=fused to narrow it."
    return f"The interval is for software={software.name}."


def with_batch(spec: RunSpec, micro: int, accumulation: int) -> RunSpec:
    """Return `spec` with another micro-batch and accumulation, and the global batch that follows from them."""
    total = micro * accumulation * spec.data_parallel
    return spec.model_copy(update={"batch": Batch(micro=micro, accumulation=accumulation, global_=total)})


class Workload(NamedTuple):
    """The properties of a run that decide the work and the activations of one rank in one micro-step."""

    micro: int  # samples per micro-batch
    lengths: tuple[tuple[str, int], ...]  # tokens per sample by kind, padding included
    width: int  # bytes per element
    attention: Literal["sdpa", "eager", "flex"]
    dropout: bool
    checkpointing: bool
    device: Device
    fp16: bool
    chunk: int | None  # tokens whose loss is computed at the same time; None: all
    documents: bool = False  # each token attends only to its own document
    compiled: bool = False  # each block is compiled as one graph
    software: Software = OWN

    def tokens(self, kind: str) -> int:
        """Return the number of tokens of a kind in one sample. Raises NoPrediction if samples have no tokens of this
        kind."""
        for name, length in self.lengths:
            if name == kind:
                return length
        known = ", ".join(name for name, _ in self.lengths)
        raise NoPrediction(f"tokens of kind {kind}", f"no prediction: a sample has {known}", "choose another objective")


def get_network(spec: RunSpec) -> Stacks:
    """Return the network of a spec's model, with its adapters. Raises NoPrediction if the model family does not
    describe its network. Raises it also if `adapter.frozen` selects frozen parameters by a pattern of their names,
    since the description of a network does not have the names of parameters."""
    network = models.build_network(spec.model)
    if network is None:
        rule = "no prediction: the family does not describe this model's network"
        raise NoPrediction(f"model.family={spec.model.family}", rule, "measure it")
    if spec.adapter.frozen:
        rule = "no prediction: the described network has no names of parameters"
        raise NoPrediction(f"adapter.frozen={spec.adapter.frozen}", rule, "measure it")
    return _adapt_network(network, spec.adapter)


def describe_parameters(spec: RunSpec) -> str:
    """Return the numbers of trained and of all parameters as text. The text is empty if all parameters are trained.
    Raises NoPrediction if the numbers are unknown."""
    network = get_network(spec)
    trained, total = count_trained_parameters(network), count_parameters(network)
    return "" if trained == total else f"{trained:,} trained of {total:,} ({100 * trained / total:.2g} %)"


@functools.lru_cache(maxsize=1024)  # points of a sweep share it
def _adapt_network(network: Stacks, adapter: AdapterSpec) -> Stacks:
    """Return the network with the adapters of a spec. Raise UserError if the adapters target a matrix that the network
    does not have."""
    if (adapted := read_adapter(adapter)) is None:
        return network
    check_targets(adapted.targets, [name for stack in network.stacks for part in stack.block for name in part.names])
    return dataclasses.replace(network, adapter=adapted)


def build_workload(spec: RunSpec, device: Device, software: Software = OWN) -> Workload:
    """Return the properties of `spec` that decide the work and the activations of one rank in one micro-step on
    `device`. `software` says how well the kernels of the training software are optimised: `eager`, `usual` or
    `fused`."""
    return Workload(
        spec.batch.micro, tuple(spec.sequence.items()), WIDTH[spec.precision], spec.model.attention,
        spec.model.dropout > 0, spec.activation_checkpointing, device, spec.precision == "fp16",
        spec.model.loss_chunk_tokens, any(kind.positions for kind in objectives.load(spec.objective).KINDS),
        spec.model.compile == "blocks", software,
    )  # fmt: skip


def is_fused(network: Stacks, load: Workload, attention: Attention) -> bool:
    """Return True if an attention never writes its scores to memory.

    On a CPU, torch's sdpa writes the scores to memory in two cases: if there is dropout, or if a position bias needs a
    gradient. A frozen bias needs no gradient. In cross-attention, T5 of the library transformers adds a tensor of zeros
    in place of a bias. With activation checkpointing, this tensor of zeros needs a gradient.
    """
    if load.attention == "sdpa" and load.device == "cpu":
        made_before = attention.zero_bias and not attention.bias_per_layer
        needs_gradient = (attention.position_bias and network.trains_all) or (made_before and load.checkpointing)
        return not (needs_gradient or load.dropout)
    return load.attention != "eager"


class Live(NamedTuple):
    """Operands of an attention. A field is True if the backward pass computes the gradient of this operand."""

    queries: bool
    keys: bool
    values: bool


def find_live(network: Stacks, part: Attention, reached: bool) -> Live:
    """Return whether the backward pass computes the gradients of the queries, keys and values of the attention `part`.
    `reached` is True if the backward pass computes the gradient of the attention's input. In cross-attention, keys and
    values are computed from the output of another stack. The output of that stack always has a gradient."""
    adapter, names = network.adapter, [name for name, _ in list_named_matrices(network, part)[:-1]]
    found = [reached or adapter is None or adapter.adapts(name) for name in names]
    if part.over is not None:
        found = found[:1] + [True] * len(found[1:])
    return Live(found[0], found[len(found) // 2], found[-1])


def is_output_reached(network: Stacks, part: Attention | Mlp, reached: bool) -> bool:
    """Return True if the backward pass computes the gradient of a sub-layer's output. One of three conditions is
    enough: the sub-layer has trained parameters, the sub-layer's input has a gradient (`reached`), or the sub-layer
    attends to another stack."""
    far = isinstance(part, Attention) and part.over is not None
    return reached or far or any(matrix.trained for matrix in list_part_matrices(network, part))


def predict_engine_memory(
    spec: RunSpec, device: Device, room: int | None = None, *, rehearsed: bool = False
) -> EngineMemory:
    """Return the engine's contribution to the memory of a rank of `spec`, on a device with `room` bytes (None:
    unknown). `rehearsed` is true if one rank runs alone and collectives are only simulated. Raises NoPrediction, a
    UserError, if the engine cannot predict its memory."""
    predict = engines.facts(spec).memory
    if predict is None:
        raise _build_error(spec, "its memory")
    return predict(spec, get_model_sizes(get_network(spec)), device, room, rehearsed)


def predict_engine_step(spec: RunSpec, device: Device) -> EngineStep:
    """Return the costs that the engine adds to the passes of a step. Raises NoPrediction, a UserError, if the engine
    cannot predict them."""
    predict = engines.facts(spec).step
    if predict is None:
        raise _build_error(spec, "its costs of a step")
    return _add_target_count(predict(spec, get_model_sizes(get_network(spec)), device), spec)


def predict_pipeline(spec: RunSpec, device: Device, *, rehearsed: bool = False) -> PipelineCosts | None:
    """Return the engine's costs for each position of a pipeline; None for an engine that does not cut a model into
    stages. Raise UserError if the engine cannot predict them."""
    predict = engines.facts(spec).pipeline
    if predict is None:
        return None
    if spec.adapter != AdapterSpec():
        rule = "no prediction: a pipeline has neither adapters nor frozen parts"
        raise NoPrediction(f"adapter={spec.adapter.name}", rule, "choose an engine without a pipeline")
    costs = predict(spec, get_network(spec), device, rehearsed)
    places = (place._replace(step=_add_target_count(place.step, spec)) for place in costs.places)
    return costs._replace(places=tuple(places))


def _add_target_count(step: EngineStep, spec: RunSpec) -> EngineStep:
    """Return a copy of `step`, the engine's costs of one step. If the loss is weighted by target tokens, one all-reduce
    is added. This all-reduce sums the number of target tokens (one fp64 value per rank) before the forward passes."""
    if spec.world_size == 1 or not objectives.weighs_targets(spec):
        return step
    counted = Transfer("all_reduce", "forward", 8, 1, 1, False, spec.world_size)
    return step._replace(transfers=[*step.transfers, counted])


def _build_error(spec: RunSpec, missing: str) -> NoPrediction:
    return NoPrediction(f"engine.backend={spec.engine.backend}", f"no prediction of {missing}", "measure it")


@functools.lru_cache(maxsize=1024)  # engines' own caches use this value as a key
def get_model_sizes(network: Stacks) -> ModelSizes:
    """Return the sizes of a network as engines need them. Equal networks give the same object, which engines use as a
    key of their caches."""
    return ModelSizes(
        tuple(list_tensors(network)), functools.partial(list_modules, network), functools.partial(units, network),
        tuple(list_tensors(network, trained=False)),
    )  # fmt: skip
