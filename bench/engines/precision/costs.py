"""What AdamW needs for a moment, in fp32 whatever the precision."""

from collections.abc import Sequence

from bench.engine_costs import count_elements
from bench.spec import FULL, Device, OptimizerSpec
from bench.stacks import EqualTensors

SCARCE = 2
"""Tensors of one size that are not neighbours: embedding and head, the position biases of two stacks."""


def count_adamw_bytes(optimizer: OptimizerSpec, device: Device, sizes: Sequence[EqualTensors]) -> int:
    """Return the bytes of AdamW's intermediates (torch 2.13): on a GPU torch's takes all square roots at once, on a CPU
    one tensor's root and quotient, the last tensor's still beside them; fused kernels have none."""
    if optimizer.implementation != "torch":
        return 0
    if device == "cuda":
        return FULL * count_elements(sizes)
    # embedding and head have small neighbours, a layer's matrices each other
    return FULL * max((3 if size.number > SCARCE else 2) * size.elements for size in sizes)
