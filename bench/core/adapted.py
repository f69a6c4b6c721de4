"""The frozen and the adapted matrices of a network with low-rank adapters (LoRA, arXiv 2106.09685), and the bytes of
quantised matrices. This module does not import torch."""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from bench.core.errors import UserError, list_names, suggest_nearest
from bench.core.spec import FULL, AdapterSpec

NF4_BLOCK, NF4_SCALES = 64, 256
"""Number of elements that share one scale of nf4, and number of scales that share one second scale under double
quantisation (defaults of bitsandbytes)."""
NF4_CODE, SCALES_CODE = 16, 256
"""Numbers of fp32 values in the code tables that each quantised matrix has: 16 in the table of nf4, and 256 in the
table of quantised scales."""
KEPT_WHOLE = frozenset({"wo"})
"""Names of matrices that are never quantised. transformers does not quantise the matrix `wo` of a T5, since its
activations may overflow in fp16."""


class Adapter(NamedTuple):
    """Low-rank adapters of a network. All other parameters are frozen."""

    rank: int
    targets: frozenset[str] = frozenset()  # names of the adapted matrices; empty: all matrices of all blocks
    dropout: bool = False  # True: each adapter drops elements of its input
    quantization: Literal["none", "nf4", "int8"] = "none"
    double_quantization: bool = False

    def adapts(self, name: str) -> bool:
        """Return True if the matrices of this name have an adapter."""
        return not self.targets or name in self.targets

    def packs(self, name: str) -> bool:
        """Return True if the matrices of this name are stored in quantised form."""
        return self.quantization != "none" and name not in KEPT_WHOLE

    def packed_bytes(self, name: str, rows: int, columns: int) -> int:
        """Return the bytes of a quantised matrix as bitsandbytes stores it, with its scales; 0 for a matrix that is not
        quantised.

        int8 has one byte per element, and an fp32 scale per row. nf4 has 4 bits per element, and an fp32 scale per
        block of 64. With double quantisation, a scale has one byte, and each block of 256 scales has an fp32 scale.
        """
        if not self.packs(name):
            return 0
        elements = rows * columns
        if self.quantization == "int8":
            return elements + FULL * rows
        scales = -(-elements // NF4_BLOCK)
        packed = -(-elements // 2) + FULL * NF4_CODE
        if not self.double_quantization:
            return packed + FULL * scales
        offset = 1  # the mean of the scales, subtracted before they are quantised
        return packed + scales + FULL * (-(-scales // NF4_SCALES) + SCALES_CODE + offset)


def read_adapter(spec: AdapterSpec) -> Adapter | None:
    """Return the adapters of a spec; None if it has none."""
    if spec.rank is None:
        return None
    return Adapter(spec.rank, frozenset(spec.targets), spec.dropout > 0, spec.quantization, spec.double_quantization)


def check_targets(targets: Iterable[str], names: Iterable[str]) -> None:
    """Raise UserError if a target is not the name of a matrix of the model. `targets` are the names of the matrices to
    adapt, and `names` are the names of all matrices of the model."""
    known = set(names)
    for target in sorted(set(targets) - known):
        rule, listed = "the blocks of the model have no matrix of this name", f"choose from {list_names(known)}"
        nearest = suggest_nearest(target, known, listed)
        remedy = nearest if nearest == listed else f"{nearest} Otherwise {listed}"
        raise UserError(f"adapter.targets={target}", rule, remedy)
