"""Predicted seconds of collectives, and of the transfers of a step. A transfer's exposed part is the time for which a
step waits for it, because no computing overlaps.

If a collective was calibrated on the machine, its time is interpolated between measured times. Otherwise its time
follows from the links that a ring of ranks crosses. A ring over n ranks sends (n - 1) / n of the payload over every
link, and an all-reduce sends twice that (Patarasuk and Yuan, doi 10.1016/j.jpdc.2008.09.002; nccl-tests,
doc/PERFORMANCE.md). The ring enters and leaves each node once, for any number of devices in the node. So all network
cards of a node share this traffic.
"""

import contextlib
import functools
from typing import NamedTuple

import numpy as np

from bench.core.engine_costs import Transfer
from bench.core.errors import UserError
from bench.core.machine import CollectiveKind, CollectiveTime, Machine
from bench.core.spec import RunSpec
from bench.predict.step_time.compute import ComputeTime

KIB, MIB, GIB = 2**10, 2**20, 2**30
INSIDE_SPEED, INSIDE_REACHED = 300.0, (
    (32 * KIB, 1.31), (256 * KIB, 7.47), (MIB, 18.0), (4 * MIB, 72.33), (16 * MIB, 106.16), (64 * MIB, 171.54),
    (128 * MIB, 176.92), (256 * MIB, 194.07), (512 * MIB, 222.72), (GIB, 229.04), (4 * GIB, 233.88),
)  # fmt: skip
"""Speed of a link inside a node in GB/s, and bus bandwidths of an all-reduce as (payload in bytes, GB/s). Measured on 8
A100 (results/published/collectives.csv). Other devices are assumed to reach the same share of their link speed at every
payload."""
BETWEEN_SPEED, BETWEEN_REACHED = 400.0, (
    (256 * KIB, 1.33), (MIB, 5.37), (4 * MIB, 18.9), (16 * MIB, 64.43), (64 * MIB, 156.74), (128 * MIB, 197.94),
    (256 * MIB, 229.09), (512 * MIB, 326.9), (GIB, 361.99), (4 * GIB, 377.34),
)  # fmt: skip
"""Link speed in GB/s between nodes, and bus bandwidths of an all-reduce as (payload in bytes, GB/s). Measured on 4
nodes of B200 (results/published/collectives.csv). The file's value at 32 KiB is excluded, because it is printed to one
digit."""
SCALES = {
    "intra_node_bytes_per_s": (INSIDE_REACHED, INSIDE_SPEED),
    "inter_node_bytes_per_s": (BETWEEN_REACHED, BETWEEN_SPEED),
}
LARGE = 4 * GIB
MOVED = (0.77, 1.15)
"""Low and high ratio of true to predicted time of exposed communication, for which the step waits. Steps on several
nodes of the testbed (a cluster of CPU nodes within one machine) had ratios of 0.77 to 1.12 (results/predictions). The
testbed was calibrated at both link speeds of these runs."""


class RankSpan(NamedTuple):
    """Number of nodes and ranks that take part in a collective."""

    nodes: int
    ranks: int

    @property
    def wire(self) -> float:
        """Share of the payload that crosses each link in one round of the ring."""
        return (self.ranks - 1) / self.ranks


def compute_collective_s(kind: CollectiveKind, payload_bytes: float, span: RankSpan, machine: Machine) -> float:
    """Return the seconds of one collective. Raise UserError if the speed of a link is unknown."""
    if span.ranks == 1 or not payload_bytes:
        return 0.0
    rows = machine.calibration.collectives if machine.calibration else ()
    if calibrated := [row for row in rows if (row.kind, row.nodes, row.ranks) == (kind, span.nodes, span.ranks)]:
        return _interpolate(sorted(calibrated, key=lambda row: row.payload_bytes), payload_bytes)
    rounds = 2 if kind == "all_reduce" else 1
    return rounds * payload_bytes * span.wire / _find_bytes_per_s(span, machine, payload_bytes)


def compute_hop_s(payload_bytes: float, machine: Machine, *, between_nodes: bool = False) -> float:
    """Return the seconds of sending `payload_bytes` from one device to another device in the same node. If
    `between_nodes` is true, return instead the seconds in which all devices of a node together send `payload_bytes` to
    another node."""
    return payload_bytes / _find_bytes_per_s(RankSpan(1 + between_nodes, 2), machine, payload_bytes)


def _find_bytes_per_s(span: RankSpan, machine: Machine, payload_bytes: float) -> float:
    """Return the bytes/s of the slowest link of a ring in one direction, at this payload."""
    inside, between = machine.intra_node_bytes_per_s, machine.inter_node_bytes_per_s
    needed = {"intra_node_bytes_per_s": inside} if span.ranks > span.nodes else {}
    needed |= {"inter_node_bytes_per_s": between} if span.nodes > 1 else {}
    for name, value in needed.items():
        if value is None:
            rule = f"unknown for machine={machine.name}, so no communication time is predicted"
            raise UserError(f"machine.{name}", rule, f"set machine.{name}, or measure it with zeroscale calibrate")
    # a link reaches its rate only with large payloads
    reached = {name: _find_link_share(name, payload_bytes) for name in needed}
    # a measured rate is that of large payloads, so it already contains their link share
    for name in reached.keys() & machine.calibrated.keys():
        reached[name] /= _find_link_share(name, LARGE)
    return min(reached[name] * value for name, value in needed.items() if value)


@functools.lru_cache(maxsize=4096)  # points of a sweep share it
def _find_link_share(link: str, payload_bytes: float) -> float:
    """Return the share of a link's speed that an all-reduce of this payload reaches.

    The share follows from published times of all-reduces. The time is interpolated linearly between the published
    payloads, and is never shorter than the time of a smaller payload. Below the smallest published payload the time is
    constant, and above the largest the rate is constant.
    """
    reached, speed = SCALES[link]
    sizes, rates = np.array(reached).T
    at_speed_s = np.maximum.accumulate(sizes / rates)  # in units of 1e-9 s
    beyond = max(1.0, payload_bytes / float(sizes[-1]))
    return payload_bytes / (float(np.interp(payload_bytes, sizes, at_speed_s)) * beyond * speed)


def _interpolate(rows: list[CollectiveTime], payload_bytes: float) -> float:
    """Return the seconds of a collective, interpolated linearly between the payloads that the calibration measured
    (`rows`). Below the smallest measured payload the time is constant, and above the largest the rate is constant."""
    sizes, seconds = [row.payload_bytes for row in rows], [row.s for row in rows]
    if payload_bytes > sizes[-1]:
        return seconds[-1] * payload_bytes / sizes[-1]
    return float(np.interp(payload_bytes, sizes, seconds))


def change_link_speed(slow: Machine, fast: Machine, bytes_per_s: float) -> Machine:
    """Return the calibrated machine `slow` with another link speed, `bytes_per_s` between its nodes. `slow` and `fast`
    are calibrations of the same machine at two link speeds.

    The time of a collective is modelled as the sum of two terms: a constant time of software, and the collective's
    bytes divided by the link speed. The measurements at two speeds determine both terms. Raise UserError if the two
    link speeds are not known or not different, or if either machine has no calibration.
    """
    speeds = read_link_speed(slow), read_link_speed(fast)
    if None in speeds or speeds[0] == speeds[1] or not (slow.calibration and fast.calibration):
        rule = "a machine calibrated at two link speeds is needed, with inter_node_bytes_per_s known of both"
        raise UserError(f"{slow.name}, {fast.name}", rule, "calibrate both")
    inverse = [1 / speed for speed in (*speeds, bytes_per_s) if speed]
    between = (inverse[2] - inverse[1]) / (inverse[0] - inverse[1])  # 1 at the slow speed, 0 at the fast one
    quick = {(r.kind, r.nodes, r.ranks, r.payload_bytes): r.s for r in fast.calibration.collectives}
    rows = []
    for row in slow.calibration.collectives:
        other = quick.get((row.kind, row.nodes, row.ranks, row.payload_bytes))
        if other is not None:
            seconds = row.s if row.nodes == 1 else max(0.0, other + between * (row.s - other)) or min(row.s, other)
            rows.append(row.model_copy(update={"s": seconds}))
    calibration = slow.calibration.model_copy(update={"collectives": tuple(rows)})
    calibrated = {name: was for name, was in slow.calibrated.items() if name != "inter_node_bytes_per_s"}
    # the new rate is not a measured one, so it is no longer listed as calibrated
    changed = {"inter_node_bytes_per_s": bytes_per_s, "calibration": calibration, "calibrated": calibrated}
    return slow.model_copy(update=changed)


def read_link_speed(machine: Machine) -> float | None:
    """Return the published bytes/s between nodes, even if a calibration has replaced this number in the machine; None
    if the published number is unknown."""
    with contextlib.suppress(KeyError, ValueError):
        return float(machine.calibrated["inter_node_bytes_per_s"])
    return machine.inter_node_bytes_per_s


class TransferTime(NamedTuple):
    """A transfer of a step with two times: the seconds of all its calls, and the exposed seconds, for which the step
    waits."""

    transfer: Transfer
    whole_s: float
    exposed_s: float


def time_transfers(
    found: list[Transfer], own: ComputeTime, spec: RunSpec, machine: Machine, micro_steps: int
) -> list[TransferTime]:
    """Return the seconds of each transfer in a step of `micro_steps` micro-steps. `own` is the rank's computing time in
    the step, with which transfers can overlap.

    Transfers that overlap with the same pass (forward or backward) share the links. So the computing time of the pass
    is divided among these transfers in proportion to their seconds, and each transfer overlaps only with its share. One
    call of each transfer overlaps with nothing: the first call of a gather, because computing waits for it, or the last
    call of a reduction, because no computing is left after it.
    """
    whole = {transfer: compute_transfer_s(transfer, spec, machine) for transfer in found}
    computing = {"forward": own.forward, "backward": own.recomputation + own.backward}
    moved = []
    for transfer, seconds in whole.items():
        if not transfer.overlaps:
            moved.append(TransferTime(transfer, seconds, seconds))
            continue
        together = sum(s for other, s in whole.items() if other.overlaps and other.when == transfer.when)
        # if a transfer happens once in several micro-steps, it overlaps only with that share of the computing
        room = computing[transfer.when] * transfer.passes / micro_steps
        share = seconds / together if together else 0.0
        first = transfer.alone_bytes / transfer.payload_bytes if transfer.alone_bytes else 1 / transfer.calls
        alone = seconds * first
        covered_s = share * room * (1 - 1 / transfer.calls)
        moved.append(TransferTime(transfer, seconds, alone + max(0.0, seconds - alone - covered_s)))
    return moved


def compute_transfer_s(transfer: Transfer, spec: RunSpec, machine: Machine) -> float:
    """Return the seconds of all calls of a transfer in a step."""
    nodes = transfer.nodes or max(1, -(-transfer.ranks // spec.devices_per_node))
    calls = max(transfer.calls, 1)
    span = RankSpan(min(nodes, spec.nodes), transfer.ranks)
    payload = transfer.payload_bytes / calls * (transfer.at_once if nodes > 1 else 1)
    return transfer.passes * calls * compute_collective_s(transfer.kind, payload, span, machine)
