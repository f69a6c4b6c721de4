"""The parts of a forward pass as memory has them; backward goes through them in reverse."""

from typing import NamedTuple


class Segment(NamedTuple):
    """A part of a forward pass; bytes per rank but for `parameters` and `largest`, which are elements."""

    saved: int  # kept from its forward to its backward
    forward: int = 0  # needed while its forward runs, beyond `saved`
    backward: int = 0  # needed while its backward runs, beyond what is saved up to here
    parameters: int = 0  # whose gradients are complete after its backward
    largest: int = 0  # the largest of them: a gradient lies beside its bucket until it is copied
    carried: int = 0  # elements of an incomplete gradient that wait from here to the end of backward
    transposed: int = 0  # elements of a gradient that is not added to in its place, as torch's own linear makes it
    standing: int = 0  # of `backward`, what lives between two operations as well: what was run again, what waits
    logits: bool = False  # as wide as the vocabulary: shown apart


class RepeatedSegments(NamedTuple):
    """Segments in the order of forward, and how often they follow each other."""

    block: list[Segment]
    times: int = 1
