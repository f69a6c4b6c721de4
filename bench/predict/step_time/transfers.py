"""Seconds of the transfers of a step, and how much of them nothing hides."""

from typing import NamedTuple

from bench.engine_costs import Transfer
from bench.machine import Machine
from bench.predict.step_time.compute import ComputeTime
from bench.predict.step_time.network import RankSpan, compute_collective_s
from bench.spec import RunSpec


class TransferTime(NamedTuple):
    """Seconds of a transfer in a step."""

    transfer: Transfer
    whole_s: float
    exposed_s: float


def time_transfers(
    found: list[Transfer], own: ComputeTime, spec: RunSpec, machine: Machine, micro_steps: int
) -> list[TransferTime]:
    """Return each transfer's seconds in a step of so many `micro_steps`. What overlaps in one pass shares its links,
    and what the pass computes hides it: but for the first call of a gather or the last of a reduction, each call runs
    beside its share of the pass."""
    whole = {transfer: compute_transfer_s(transfer, spec, machine) for transfer in found}
    computing = {"forward": own.forward, "backward": own.recomputation + own.backward}
    moved = []
    for transfer, seconds in whole.items():
        if not transfer.overlaps:
            moved.append(TransferTime(transfer, seconds, seconds))
            continue
        together = sum(s for other, s in whole.items() if other.overlaps and other.when == transfer.when)
        room = computing[transfer.when] * transfer.passes / micro_steps
        share = seconds / together if together else 0.0
        alone = seconds * (
            transfer.alone_bytes / transfer.payload_bytes if transfer.alone_bytes else 1 / transfer.calls
        )
        covered_s = share * room * (1 - 1 / transfer.calls)
        moved.append(TransferTime(transfer, seconds, alone + max(0.0, seconds - alone - covered_s)))
    return moved


def compute_transfer_s(transfer: Transfer, spec: RunSpec, machine: Machine) -> float:
    """Return the seconds of all calls in a step."""
    nodes = transfer.nodes or max(1, -(-transfer.ranks // spec.devices_per_node))
    calls = max(transfer.calls, 1)
    span = RankSpan(min(nodes, spec.nodes), transfer.ranks)
    payload = transfer.payload_bytes / calls * (transfer.at_once if nodes > 1 else 1)
    return transfer.passes * calls * compute_collective_s(transfer.kind, payload, span, machine)
