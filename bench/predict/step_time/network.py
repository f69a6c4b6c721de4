"""Predicted seconds of collectives, and of the transfers of a step. A transfer's exposed part is the time for which a
step waits for it, because no computing overlaps.

If a collective was calibrated on the machine, its time is interpolated between measured times. Otherwise its time
follows from the links that a ring of ranks crosses. A ring over n ranks sends (n - 1) / n of the payload over every
link, and an all-reduce sends twice that (Patarasuk and Yuan, doi 10.1016/j.jpdc.2008.09.002; nccl-tests,
doc/PERFORMANCE.md). The ring enters and leaves each node only once, even if the node has many devices. The bytes that
enter and leave a node are assumed to be divided among all network cards of the node.
"""

import contextlib
import functools
import math
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
A100 (results/published/collectives.csv)."""
BETWEEN_SPEED, BETWEEN_REACHED = 400.0, (
    (256 * KIB, 1.33), (MIB, 5.37), (4 * MIB, 18.9), (16 * MIB, 64.43), (64 * MIB, 156.74), (128 * MIB, 197.94),
    (256 * MIB, 229.09), (512 * MIB, 326.9), (GIB, 361.99), (4 * GIB, 377.34),
)  # fmt: skip
"""Link speed in GB/s between nodes, and bus bandwidths of an all-reduce as (payload in bytes, GB/s). Measured on 4
nodes of B200 (results/published/collectives.csv). The file's value at 32 KiB is excluded, because it is printed to one
digit."""
HOP_INSIDE_S, HOP_BETWEEN_S = 3.4e-6, 14e-6
"""Seconds that one step of a ring takes in addition to its bytes: inside a node (NVLink) and between nodes. NCCL
chooses its algorithms by these numbers (src/graph/tuning.cc of a version with support for Blackwell, protocol Simple).
For medium payloads, NCCL may choose another protocol, whose steps take about half of this time."""
TREE_HOP_INSIDE_S = 4e-6
"""The same for a tree inside a node, from the same file."""
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

    @property
    def ring_s(self) -> float:
        """Latency in seconds of all hops in one round of the ring, without the time to send the bytes."""
        between = min(self.nodes, self.ranks) - 1
        return between * HOP_BETWEEN_S + (self.ranks - 1 - between) * HOP_INSIDE_S

    @property
    def tree_s(self) -> float:
        """Latency in seconds of all hops on the way up a tree over all ranks, without the time to send the bytes."""
        return (self.ranks / self.nodes - 1) * TREE_HOP_INSIDE_S + math.log2(self.nodes) * HOP_BETWEEN_S


def compute_collective_s(kind: CollectiveKind, payload_bytes: float, span: RankSpan, machine: Machine) -> float:
    """Return the seconds of one collective. Raise UserError if the speed of a link is unknown."""
    if span.ranks == 1 or not payload_bytes:
        return 0.0
    rows = machine.calibration.collectives if machine.calibration else ()
    if calibrated := [row for row in rows if (row.kind, row.nodes, row.ranks) == (kind, span.nodes, span.ranks)]:
        return _interpolate(sorted(calibrated, key=lambda row: row.payload_bytes), payload_bytes)
    rounds = 2 if kind == "all_reduce" else 1
    return rounds * _compute_round_s(payload_bytes, span, machine, span.wire, tree=kind == "all_reduce")


def compute_hop_s(payload_bytes: float, machine: Machine, *, between_nodes: bool = False) -> float:
    """Return the seconds of sending `payload_bytes` from one device to another device in the same node. If
    `between_nodes` is true, the bytes are sent to another node instead, and `payload_bytes` is the total of all sending
    devices of the node."""
    return _compute_round_s(payload_bytes, RankSpan(1 + between_nodes, 2), machine)


def _compute_round_s(
    payload_bytes: float, span: RankSpan, machine: Machine, wire: float = 1.0, *, tree: bool = False
) -> float:
    """Return the seconds of one round of a ring on its slowest link, in one direction. `wire` is the share of the
    payload that crosses the link. If `tree` is true, the latency of a tree's hops is used whenever it is lower than the
    latency of the ring's hops."""
    inside, between = machine.intra_node_bytes_per_s, machine.inter_node_bytes_per_s
    needed = {"intra_node_bytes_per_s": inside} if span.ranks > span.nodes else {}
    needed |= {"inter_node_bytes_per_s": between} if span.nodes > 1 else {}
    for name, value in needed.items():
        if value is None:
            rule = f"unknown for machine={machine.name}, so no communication time is predicted"
            raise UserError(f"machine.{name}", rule, f"set machine.{name}, or measure it with zeroscale calibrate")
    seconds = []
    for name, speed in needed.items():
        assert speed is not None
        published = PUBLISHED[name]
        # A measured rate is that of large payloads, so it already contains the share that they reach.
        rate = speed if name in machine.calibrated else speed * published.largest_share
        crossed = span if name == "inter_node_bytes_per_s" else RankSpan(1, -(-span.ranks // span.nodes))
        hops_s, reference_s = crossed.ring_s, published.span.ring_s
        if tree and crossed.tree_s / published.span.tree_s < hops_s / reference_s:
            hops_s, reference_s = crossed.tree_s, published.span.tree_s
        # Fewer hops shorten the published wait in proportion. Each further hop adds its own time.
        wait_s = min(1.0, hops_s / reference_s) * published.compute_wait_s(payload_bytes)
        seconds.append(wire * payload_bytes / rate + wait_s + max(0.0, hops_s - reference_s))
    return max(seconds)


class PublishedLink(NamedTuple):
    """A link with published bus bandwidths of an all-reduce.

    The time of a collective is modelled as the sum of two terms, as in NCCL's own model. The first is the bytes on the
    wire, divided by the rate of very large payloads, which is a fixed share of the link's speed. The second is the time
    for which a collective waits in its hops and in software. It does not depend on the link's speed.
    """

    speed: float  # GB/s
    reached: tuple[tuple[int, float], ...]  # payload in bytes, GB/s
    span: RankSpan

    @property
    def largest_share(self) -> float:
        """Share of the link's speed that very large payloads reach."""
        return max(rate for _, rate in self.reached) / self.speed

    @functools.lru_cache(maxsize=4096)  # noqa: B019 - two objects, and points of a sweep share it
    def compute_wait_s(self, payload_bytes: float) -> float:
        """Return the seconds for which one round with this payload waits in its hops and in software.

        The waiting time is the published time of the round minus the time of its bytes at the rate of very large
        payloads. It is interpolated linearly between published payloads. It is constant below the smallest payload, and
        0 above the largest.
        """
        sizes, rates = np.array(self.reached).T
        fastest = self.largest_share * self.speed
        wait_s = self.span.wire * (np.maximum.accumulate(sizes / rates) - sizes / fastest) * 1e-9
        return float(np.interp(payload_bytes, sizes, wait_s, right=0.0))


PUBLISHED = {
    "intra_node_bytes_per_s": PublishedLink(INSIDE_SPEED, INSIDE_REACHED, RankSpan(1, 8)),
    "inter_node_bytes_per_s": PublishedLink(BETWEEN_SPEED, BETWEEN_REACHED, RankSpan(4, 32)),
}


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

    Transfers that overlap with the same pass (forward or backward) share the links, so they are assumed not to run at
    the same time. Each transfer can therefore overlap only with its share of the pass's computing time. The shares are
    in proportion to the seconds of the transfers.

    One call of each transfer overlaps with nothing. For a gather, it is the first call, because computing waits for it.
    For a reduction, it is the last call, because no computing is left after it.
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
