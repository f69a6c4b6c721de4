"""The network of a model family as sizes: what prediction computes with, whatever the family."""

from typing import NamedTuple


class Tensors(NamedTuple):
    """Parameters of one size."""

    elements: int
    number: int


class Module(NamedTuple):
    """A module at which ZeRO's stage 3 stops to gather its weight, and others ahead."""

    segment: int  # in which its forward runs, counted in the order of forward
    weight: int | None = None  # one number for each parameter, shared ones have the same; None: it has none of its own
    size: int = 0  # of the weight: which of the family's `tensors`
    block: int | None = None  # that checkpointing runs again
    indexed: bool = False  # its input are indices
    completes: bool = True  # its backward completes the weight's gradient


def padded(elements: int, ranks: int) -> int:
    """Elements of a tensor that is divided among ranks, as many for each."""
    return -(-elements // ranks) * ranks
