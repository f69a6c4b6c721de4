"""What of a run decides its work and its activations: the network, and how many tokens of which kind go through it."""

from typing import Literal, NamedTuple

from bench import models, objectives
from bench.errors import NoPrediction
from bench.spec import WIDTH, Device, RunSpec
from bench.stacks import Attention, Stacks


class Software(NamedTuple):
    """How a published run differs from what is run here, where its software is not one of the engines."""

    fused: bool = False  # kernels made by hand: what lies between two products is one, but each is started by Python
    last_again: bool = True  # where blocks are checkpointed, the last stage computes its own again, too


OWN = Software()


class Workload(NamedTuple):
    """What of a run decides the work and the activations of one rank in one micro-step."""

    micro: int  # samples
    lengths: tuple[tuple[str, int], ...]  # tokens per sample by kind, padding included
    width: int  # bytes per element
    attention: Literal["sdpa", "eager", "flex"]
    dropout: bool
    checkpointing: bool
    device: Device
    fp16: bool
    chunk: int | None  # tokens whose loss is taken at a time; None: all
    documents: bool = False  # a token sees those of its own document alone
    compiled: bool = False  # each block as one graph
    software: Software = OWN

    def tokens(self, kind: str) -> int:
        """Return the tokens of a kind in a sample; NoPrediction for a kind that a sample has none of."""
        for name, length in self.lengths:
            if name == kind:
                return length
        known = ", ".join(name for name, _ in self.lengths)
        raise NoPrediction(f"tokens of kind {kind}", f"no prediction: a sample has {known}", "choose another objective")


def get_network(spec: RunSpec) -> Stacks:
    """Return the network of a spec's model; NoPrediction where its family does not describe it."""
    network = models.build_network(spec.model)
    if network is None:
        rule = "no prediction: the family does not describe this model's network"
        raise NoPrediction(f"model.family={spec.model.family}", rule, "measure it")
    return network


def build_workload(spec: RunSpec, device: Device, software: Software = OWN) -> Workload:
    """Return what one rank of `spec` works on in one micro-step on `device`."""
    return Workload(
        spec.batch.micro, tuple(spec.sequence.items()), WIDTH[spec.precision], spec.model.attention,
        spec.model.dropout > 0, spec.activation_checkpointing, device, spec.precision == "fp16",
        spec.model.loss_chunk_tokens, any(kind.positions for kind in objectives.load(spec.objective).KINDS),
        spec.model.compile == "blocks", software,
    )  # fmt: skip


def is_fused(load: Workload, attention: Attention) -> bool:
    """Whether scores are never written out. torch's sdpa writes them out on a CPU where a bias needs a gradient; with
    checkpointing transformers has zeros in the bias's place need one, too."""
    if load.attention == "sdpa" and load.device == "cpu":
        made_before = attention.zero_bias and not attention.bias_per_layer
        needs_gradient = attention.position_bias or (made_before and load.checkpointing)
        return not (needs_gradient or load.dropout)
    return load.attention != "eager"
