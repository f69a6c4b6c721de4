"""Where a model is cut into stages: consecutive units, so that the slowest stage is as fast as it can be; and among how
many ranks its matrices can be sliced."""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence

from bench.core.errors import UserError
from bench.core.network import Attention, Mlp, Stack, Stacks
from bench.core.spec import RunSpec


def count_unit_flops(network: Stacks, tokens: Mapping[str, int]) -> list[int]:
    """Return the matmul FLOPs of one sample's forward by unit: the embedding, which has none, each block in the order
    of forward, the head. `tokens` of a sample are by kind; attention is over the full square, masked or not."""
    blocks = [
        flops
        for stack in network.stacks
        for flops in [sum(_count_part_flops(network, stack, part, tokens) for part in stack.block)] * stack.layers
    ]
    return [0, *blocks, 2 * tokens[network.stacks[-1].tokens] * network.table]


def _count_part_flops(network: Stacks, stack: Stack, part: Attention | Mlp, tokens: Mapping[str, int]) -> int:
    own = tokens[stack.tokens]
    if isinstance(part, Mlp):
        return sum(2 * own * k * n for k, n in part.matrices(network.width))
    others = own if part.over is None else tokens[network.named(part.over).tokens]
    products = 2 * network.width * (2 * own * part.inner + 2 * others * part.key_inner)
    return products + 2 * 2 * own * others * part.inner  # scores, and weighted values


def cut_units(costs: Sequence[int], stages: int) -> list[range]:
    """Return the units of each stage: at least one each, in their order, the dearest stage as cheap as it can be. Of
    several such cuts it is one whose stages are nearly alike. ValueError for more stages than units."""
    if not 0 < stages <= len(costs):
        raise ValueError(f"{stages} stages of {len(costs)} units")
    before = [0, *itertools.accumulate(costs)]  # costs of all units before one
    limit = _find_limit(before, stages, max(costs))
    earliest = _list_earliest_ends(before, stages, limit)
    ends = [0]
    for stage in range(1, stages + 1):
        even = bisect_left(before, before[-1] * stage / stages)
        if even and before[even] + before[even - 1] > 2 * before[-1] * stage / stages:
            even -= 1  # the unit before it is nearer
        latest = min(bisect_right(before, before[ends[-1]] + limit) - 1, len(costs) - (stages - stage))
        ends.append(min(max(even, earliest[stage], ends[-1] + 1), latest))
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]


def _find_limit(before: Sequence[int], stages: int, dearest: int) -> int:
    """Return the cost of the dearest stage in the best cut, by halving what lies between its bounds."""
    low, high = max(dearest, -(-before[-1] // stages)), before[-1]
    while low < high:
        middle = (low + high) // 2
        if _fits(before, stages, middle):
            high = middle
        else:
            low = middle + 1
    return low


def _fits(before: Sequence[int], stages: int, limit: int) -> bool:
    """Whether no stage costs more than a limit that every unit keeps, if each takes as many units as it may."""
    end = 0
    for _ in range(stages):
        end = bisect_right(before, before[end] + limit) - 1
    return end == len(before) - 1


def _list_earliest_ends(before: Sequence[int], stages: int, limit: int) -> list[int]:
    """Return by number of stages where the last of them may end at the earliest, so that the others keep the limit."""
    ends = [len(before) - 1]
    for stage in range(stages - 1, -1, -1):
        ends.append(max(stage, bisect_left(before, before[ends[-1]] - limit)))
    return ends[::-1]


def check_slices(spec: RunSpec, network: Stacks) -> None:
    """Raise UserError where a model's matrices cannot be sliced into equal parts, one for each tensor-parallel rank."""
    ranks = spec.parallel.tensor
    sizes = {"tokens in its vocabulary": network.vocab}
    for part in (part for stack in network.stacks for part in stack.block):
        if isinstance(part, Mlp):
            sizes["inner elements of its feed-forward layers"] = part.inner
        else:
            sizes["heads"] = part.heads
            sizes["heads of keys and values"] = part.key_heads or part.heads
    for what, size in sizes.items():
        if size % ranks:
            common = math.gcd(*sizes.values())
            fitting = ", ".join(str(ranks) for ranks in range(1, min(common, 64) + 1) if common % ranks == 0)
            rule = f"it does not divide the {size:,} {what} of {spec.model.name}"
            raise UserError(f"parallel.tensor={ranks}", rule, f"choose one of {fitting}")
