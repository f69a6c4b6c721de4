"""Division of a model into stages of consecutive units (embedding, blocks, head) that makes the slowest stage as fast
as possible. Also the check that the model's matrices can be sliced for tensor parallelism."""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

from bench.core.errors import UserError
from bench.core.network import Mlp, Stacks
from bench.core.spec import RunSpec

_VOCABULARY = "tokens in the vocabulary"
_PADDED = 128
"""A padded vocabulary has a multiple of this number of tokens on each tensor-parallel rank, as in Megatron-LM."""


def count_unit_flops(network: Stacks, tokens: Mapping[str, int]) -> list[int]:
    """Return the matmul FLOPs of each unit in one sample's forward pass. The units are the embedding (0 FLOPs), each
    block in the order of the forward pass, and the head.

    `tokens` has the number of tokens per sample by kind, such as the tokens of the encoder. Attention counts all pairs
    of tokens, masked or not.
    """
    flops = [0]
    for stack in network.stacks:
        own, block = tokens[stack.tokens], 0
        for part in stack.block:
            if isinstance(part, Mlp):
                block += sum(2 * own * k * n for k, n in part.matrices(network.width))
                continue
            others = own if part.over is None else tokens[network.named(part.over).tokens]
            # four projection matrices
            block += 2 * network.width * (2 * own * part.inner + 2 * others * part.key_inner)
            block += 2 * 2 * own * others * part.inner  # attention scores and weighted values
        flops += [block] * stack.layers
    return [*flops, 2 * tokens[network.stacks[-1].tokens] * network.table]


def cut_units(costs: Sequence[int], stages: int) -> list[range]:
    """Return the range of consecutive units for each stage. Every stage has at least one unit, and the cost of the most
    expensive stage is minimal.

    Among several such divisions, the function chooses one with nearly equal stages. Raise ValueError if there are more
    stages than units.
    """
    if not 0 < stages <= len(costs):
        raise ValueError(f"{stages} stages of {len(costs)} units")
    before = [0, *itertools.accumulate(costs)]  # costs of all units before each unit
    limit = _find_limit(before, stages, max(costs))
    # earliest[n]: earliest end of stage n for which the later stages stay within the limit
    earliest = [len(costs)]
    for stage in range(stages - 1, -1, -1):
        earliest.insert(0, max(stage, bisect_left(before, before[earliest[0]] - limit)))
    ends = [0]
    for stage in range(1, stages + 1):
        even = bisect_left(before, before[-1] * stage / stages)
        if even and before[even] + before[even - 1] > 2 * before[-1] * stage / stages:
            even -= 1  # the previous unit is nearer to an equal division
        latest = min(bisect_right(before, before[ends[-1]] + limit) - 1, len(costs) - (stages - stage))
        ends.append(min(max(even, earliest[stage], ends[-1] + 1), latest))
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]


def _find_limit(before: Sequence[int], stages: int, dearest: int) -> int:
    """Return the smallest possible cost of the most expensive stage, found by bisection. `before[n]` is the summed cost
    of the first n units. `dearest` is the cost of the most expensive unit."""
    low, high = max(dearest, -(-before[-1] // stages)), before[-1]
    while low < high:
        middle, end = (low + high) // 2, 0
        for _ in range(stages):  # each stage takes as many units as the limit allows
            end = bisect_right(before, before[end] + middle) - 1
        low, high = (low, middle) if end == len(before) - 1 else (middle + 1, high)
    return low


def check_slices(spec: RunSpec, network: Stacks) -> None:
    """Raise UserError if a model's matrices cannot be divided into one equal slice for each tensor-parallel rank."""
    ranks = spec.parallel.tensor
    sizes = {_VOCABULARY: network.vocab}
    for part in (part for stack in network.stacks for part in stack.block):
        if isinstance(part, Mlp):
            sizes["inner elements of the feed-forward layers"] = part.inner
        else:
            sizes["heads"] = part.heads
            sizes["heads of keys and values"] = part.key_heads or part.heads
    others = [size for name, size in sizes.items() if name != _VOCABULARY]
    for name, size in sizes.items():
        if size % ranks:
            common = math.gcd(*sizes.values())
            fitting = ", ".join(str(ranks) for ranks in range(1, min(common, 64) + 1) if common % ranks == 0)
            rule = f"does not divide the {size:,} {name} of {spec.model.name}"
            remedy = f"choose one of {fitting}"
            if name == _VOCABULARY and "vocab" in spec.model.shape and all(one % ranks == 0 for one in others):
                padded = math.ceil(size / (_PADDED * ranks)) * _PADDED * ranks
                own = f"model.name={spec.model.name}_padded model.parameters=null"
                remedy += f", or pad the vocabulary: model.shape.vocab={padded} {own}"
            raise UserError(f"parallel.tensor={ranks}", rule, remedy)
