"""What a family tells of its model's memory: its parameters, and the steps of one forward pass, backward in reverse."""

from typing import Literal, NamedTuple

from bench.spec import WIDTH, Device, RunSpec


class Workload(NamedTuple):
    """What of a run decides the size of its activations; lengths in tokens, `width` in bytes per element."""

    micro: int
    encoder: int
    decoder: int
    width: int
    attention: Literal["sdpa", "eager", "flex"]
    dropout: bool
    checkpointing: bool
    device: Device
    fp16: bool
    chunk: int | None  # tokens whose loss is taken at a time; None: all


def workload(spec: RunSpec, device: Device) -> Workload:
    """Return what `spec` asks of one rank in one micro-step on `device`."""
    encoder, decoder = spec.sequence["encoder"], spec.sequence["decoder"]
    return Workload(
        spec.batch.micro, encoder, decoder, WIDTH[spec.precision], spec.model.attention,
        spec.model.dropout > 0, spec.activation_checkpointing, device, spec.precision == "fp16",
        spec.model.loss_chunk_tokens,
    )  # fmt: skip


class Segment(NamedTuple):
    """A part of a forward pass; bytes per rank but for `parameters` and `largest`, which are elements."""

    saved: int  # kept from its forward to its backward
    forward: int = 0  # needed while its forward runs, beyond `saved`
    backward: int = 0  # needed while its backward runs, beyond what is saved up to here
    parameters: int = 0  # whose gradients are complete after its backward
    largest: int = 0  # the largest of them: a gradient lies beside its bucket until it is copied
    carried: int = 0  # elements of an incomplete gradient that wait from here to the end of backward
    transposed: int = 0  # elements of a gradient that is not added to in its place, unless stage 3's own linear made it
    standing: int = 0  # of `backward`, what lives between two operations as well: what was run again, what waits
    logits: bool = False  # as wide as the vocabulary: shown apart


class Stack(NamedTuple):
    """Segments in the order of forward, and how often they follow each other."""

    block: list[Segment]
    times: int = 1
