"""The collectives of one optimizer step on one rank, as FSDP2 begins them, and when.

Every unit is gathered for forward; a block that was divided again also for backward. Its gradients are scattered when
its backward ends, those of what is in no block last. Calls and bytes are held against those counted over gloo.
"""

from bench.engine_costs import Transfer
from bench.engines.fsdp.costs.fsdp_run import FsdpRun

NORM_BYTES = 4
"""The gradient's squared norm in fp32."""


def transfers(run: FsdpRun) -> list[Transfer]:
    """Return what one rank moves in an optimizer step; nothing where it is alone. On a CPU nothing overlaps."""
    if run.ranks == 1:
        return []
    norm = Transfer("all_reduce", "update", NORM_BYTES, 1, 1, False, run.ranks)
    return [*_gathers(run), *_reductions(run), norm]


def _gathers(run: FsdpRun) -> list[Transfer]:
    again, blocks = run.options.reshard_after_forward, run.sizes.blocks
    beside, passes = run.device == "cuda", run.accumulation
    first, last = run.width * run.sizes.root, run.width * int(blocks[-1])
    whole = run.width * run.padded
    found = [Transfer("all_gather", "forward", whole, len(blocks) + 1, passes, beside, run.ranks, first)]
    if again is not False:
        ranks = run.ranks if again is True else again
        found += [Transfer("all_gather", "backward", whole - first, len(blocks), passes, beside, ranks, last)]
    return found


def _reductions(run: FsdpRun) -> list[Transfer]:
    """Gradients are scattered among the ranks of a copy, and what a rank has of them is summed over the copies: those
    of a node's ranks at once, each over the links between all nodes."""
    calls, beside = len(run.sizes.blocks) + 1, run.device == "cuda"
    passes = run.accumulation if run.options.reduce_every_micro_step else 1
    whole, last = run.reduced * run.padded, run.reduced * run.sizes.root
    found = [Transfer("reduce_scatter", "backward", whole, calls, passes, beside, run.ranks, last)]
    if run.copies > 1:
        alike = Transfer(
            "all_reduce", "backward", whole // run.ranks, calls, 1, beside, run.copies, last // run.ranks,
            nodes=min(run.nodes, run.copies), at_once=min(run.ranks, run.devices_per_node),
        )  # fmt: skip
        found += [alike]
    return found
