"""The ranks of one node: started together, described together, ended together."""

import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

from bench.measure.channel import LISTENER, PULSE, STACKS_SIGNAL, STARTED_AT, Pulse, without_folders
from bench.record import Circumstance
from bench.spec import RunSpec
from bench.supervisor.crew import MeetingPoint
from bench.supervisor.rank_process import RankProcess
from bench.supervisor.verdict import RankState

POLL_S = 0.2
_TERMINATE_S = 3.0  # between SIGTERM and SIGKILL
_STACKS_S = 2.0  # for every rank to print its stacks
_STACKS_CHARACTERS = 6000


class Node:
    """This node's ranks. Their output goes to `write`, a line at a time."""

    def __init__(
        self, folder: Path, spec: RunSpec, circumstance: Circumstance, number: int, write: Callable[[int, bytes], None]
    ) -> None:
        self._folder, self._spec, self._circumstance, self.number = folder, spec, circumstance, number
        self._write = write
        self._pulse = Pulse.create(spec.devices_per_node)
        self._ranks: list[RankProcess] = []

    def start(self, point: MeetingPoint, listener: socket.socket | None) -> None:
        """Start every rank of this node; rank 0 gets the `listener` that its peers connect to."""
        environment = self._environment(point)
        for local_rank in range(self._spec.devices_per_node):
            rank = self.number * self._spec.devices_per_node + local_rank
            own = {"LOCAL_RANK": str(local_rank)}
            inherit: tuple[int, ...] = (self._pulse.descriptor,)
            if listener and rank == 0:
                own[LISTENER] = str(listener.fileno())
                inherit += (listener.fileno(),)
            command = [sys.executable, "-m", "bench.worker", str(self._folder)]
            self._pulse.write(local_rank, "start", -1)
            self._ranks.append(RankProcess(rank, command, environment | own, inherit))

    @property
    def running(self) -> bool:
        return any(rank.exit_code is None for rank in self._ranks)

    @property
    def lost(self) -> bool:
        """Whether a rank has ended as none should."""
        return any(rank.exit_code for rank in self._ranks)

    def states(self) -> list[RankState]:
        """Return how every rank of this node is."""
        now, found = time.monotonic(), []
        for local_rank, rank in enumerate(self._ranks):
            beat = self._pulse.read(local_rank)
            stacks = without_folders(rank.heard.decode(errors="replace"))[-_STACKS_CHARACTERS:]
            found.append(
                RankState(
                    rank=rank.rank,
                    pid=rank.process.pid,
                    exit_code=rank.exit_code,
                    stopped=rank.stopped,
                    failure=rank.failure,
                    phase=beat.phase,
                    step=beat.step,
                    silent_s=now - beat.at,
                    stacks=stacks,
                )
            )
        return found

    def drain(self) -> None:
        """Take what the ranks have written."""
        for rank in self._ranks:
            rank.drain(self._write)

    def end(self, *, stacks: bool) -> None:
        """End whatever still runs: ask, then insist; first have every rank print its stacks, if wanted."""
        if stacks:
            for rank in self._ranks:
                rank.listening = True
                rank.signal(STACKS_SIGNAL)
            self._wait(_STACKS_S)
        for rank in self._ranks:
            if rank.exit_code is None:
                rank.stopped = True
                rank.signal(signal.SIGTERM)
                rank.signal(signal.SIGCONT)  # a stopped process would never hear it
        self._wait(_TERMINATE_S)
        for rank in self._ranks:
            rank.signal(signal.SIGKILL)  # with it go loader processes that outlived their rank
            rank.process.wait()
        self.drain()

    def _wait(self, seconds: float) -> None:
        """Give the ranks some time to end."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.running:
            time.sleep(POLL_S / 5)
            self.drain()

    def _environment(self, point: MeetingPoint) -> dict[str, str]:
        """The ranks' environment: the user's own, and what he did not choose himself."""
        threads = max(1, len(os.sched_getaffinity(0)) // self._spec.devices_per_node)
        chosen = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        if self._spec.nodes == 1:
            chosen["GLOO_SOCKET_IFNAME"] = "lo"  # a host name that does not resolve must not matter
        elif interface := self._circumstance.network.interface:
            chosen |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        given = {
            "WORLD_SIZE": str(self._spec.world_size),
            "LOCAL_WORLD_SIZE": str(self._spec.devices_per_node),
            "MASTER_ADDR": point.host,
            "MASTER_PORT": str(point.ranks_port),
            PULSE: str(self._pulse.descriptor),
            STARTED_AT: str(time.time()),
            "PYTHONUNBUFFERED": "1",
        }
        if self._circumstance.machine.device == "cpu":
            given["CUDA_VISIBLE_DEVICES"] = ""  # no library may take a GPU that the run is not about
        return chosen | dict(os.environ) | given
