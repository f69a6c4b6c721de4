"""The ranks that one supervisor looks after: started together, described together, ended together."""

import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

from bench import engines
from bench.core import store
from bench.core.processes import build_module_command
from bench.core.record import Circumstance
from bench.core.scheduling import Span
from bench.core.spec import RunSpec
from bench.measure.channel import LISTENER, PULSE, STACKS_SIGNAL, STARTED_AT, SharedHeartbeat, strip_folders
from bench.measure.environment import choose_openmp_variables, find_device_kind
from bench.measure.failures import count_oom_kills
from bench.runtime import extensions
from bench.runtime.outcome import PauseWatch, RankState
from bench.runtime.process import RankProcess, StartRank, install_handlers, start_process
from bench.runtime.transport import AgentClient, Rendezvous

POLL_S = 0.2
_TERMINATE_S = 8.0  # between SIGTERM and SIGKILL: on a busy file system rank 0 takes a while to keep its steps
_KILL_S = 5.0  # after SIGKILL, for the kernel to end a rank
_STACKS_S = 2.0  # for every rank to print its stacks
_STACKS_CHARACTERS = 6000

"""What one supervisor looks after: all ranks of a node, or one of them, where a site starts a task per device."""


def count_supervisors(spec: RunSpec, span: Span, circumstance: Circumstance | None = None) -> int:
    """Return how many supervisors a run has."""
    if circumstance and circumstance.rehearsed_rank is not None:
        return 1
    return spec.nodes if span == "node" else spec.world_size


class NodeRanks:
    """One supervisor's ranks. Their output goes to `write`, a line at a time."""

    def __init__(
        self,
        folder: Path,
        spec: RunSpec,
        circumstance: Circumstance,
        number: int,
        write: Callable[[int, bytes], None],
        span: Span = "node",
        start: StartRank = start_process,
    ) -> None:
        self._folder, self._spec, self._circumstance, self._write = folder, spec, circumstance, write
        self._numbers = _list_ranks(spec, circumstance, span, number)
        self._start = start
        self._heartbeat = SharedHeartbeat.create(spec.devices_per_node)
        self._ranks: list[RankProcess] = []
        self.pauses = PauseWatch()
        self._oom_kills = count_oom_kills()

    def start(self, rendezvous: Rendezvous, listener: socket.socket | None) -> None:
        """Start every rank; rank 0 gets the `listener` that its peers connect to."""
        environment = self._environment(rendezvous)
        command = build_module_command("bench.runtime.worker", str(self._folder))
        for rank in self._numbers:
            local_rank = self._local_rank(rank)
            descriptors = {PULSE: self._heartbeat.descriptor}
            if listener and rank == 0:
                descriptors[LISTENER] = listener.fileno()
            self._heartbeat.write(local_rank, "start", -1)
            own = environment | {"LOCAL_RANK": str(local_rank)}
            self._ranks.append(RankProcess(rank, command, own, descriptors, self._start))
        self.pauses.restart()

    @property
    def running(self) -> bool:
        return any(rank.exit_code is None for rank in self._ranks)

    @property
    def lost(self) -> bool:
        """Whether a rank has ended as none should."""
        return any(rank.exit_code for rank in self._ranks)

    def states(self) -> list[RankState]:
        """Return how every rank is."""
        now, found = time.monotonic(), []
        killed = any(rank.exit_code == -signal.SIGKILL for rank in self._ranks)
        oom_kills = count_oom_kills() - self._oom_kills if killed else 0
        for rank in self._ranks:
            progress = self._heartbeat.read(self._local_rank(rank.rank))
            stacks = strip_folders(rank.stack_output.decode(errors="replace"))[-_STACKS_CHARACTERS:]
            found.append(
                RankState(
                    rank=rank.rank,
                    pid=rank.process.pid,
                    exit_code=rank.exit_code,
                    stopped=rank.stopped,
                    failure=rank.failure,
                    phase=progress.phase,
                    step=progress.step,
                    ended_steps=progress.ended_steps,
                    halted=rank.process.pid in self.pauses.stopped,
                    silent_s=now - progress.at,
                    stacks=stacks,
                    host=socket.gethostname(),
                    oom_kills=oom_kills,
                    survived=rank.survived,
                )
            )
        return found

    def look_for_pauses(self) -> float:
        """Return the seconds for which this supervisor was paused since the last look, 0 for none."""
        running = [rank for rank in self._ranks if rank.exit_code is None]
        in_steps = any(self._heartbeat.read(self._local_rank(rank.rank)).step >= 0 for rank in running)
        return self.pauses.look([rank.process.pid for rank in running], in_steps=in_steps)

    def drain(self) -> None:
        """Take what the ranks have written."""
        for rank in self._ranks:
            rank.drain(self._write)

    def end(self, *, stacks: bool) -> None:
        """End whatever still runs: ask, then insist; first have every rank print its stacks, if wanted. A rank in an
        uninterruptible call, into a driver or a file server that is gone, survives even that and is left behind."""
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
            rank.signal(signal.SIGKILL)
        self._wait(_KILL_S)
        for rank in self._ranks:
            rank.survived = rank.exit_code is None
        self.drain()

    def close(self) -> None:
        """Give back the pipes and the pulse: a supervisor of many runs needs their numbers again."""
        for rank in self._ranks:
            rank.close()
        os.close(self._heartbeat.descriptor)

    def _local_rank(self, rank: int) -> int:
        """Return a rank's number on its node, which is that of its device; the one of a rehearsal has the node for
        itself."""
        return 0 if self._circumstance.rehearsed_rank is not None else rank % self._spec.devices_per_node

    def _wait(self, seconds: float) -> None:
        """Give the ranks some time to end."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.running:
            time.sleep(POLL_S / 5)
            self.drain()

    def _environment(self, rendezvous: Rendezvous) -> dict[str, str]:
        """The ranks' environment: the user's own, and what he did not choose himself."""
        device = self._circumstance.machine.device or find_device_kind()
        chosen = choose_openmp_variables(device, self._spec.devices_per_node) | {"TOKENIZERS_PARALLELISM": "false"}
        known = engines.find_facts(self._spec)  # an engine that is not here fails in the ranks, which leave a record
        chosen |= extensions.build_environment(known.compiled_ops if known else (), device, os.environ)
        if self._spec.nodes == 1 or self._circumstance.rehearsed_rank is not None:
            chosen["GLOO_SOCKET_IFNAME"] = "lo"  # a host name that does not resolve must not matter
        elif interface := self._circumstance.network.interface:
            chosen |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
        given = {
            "WORLD_SIZE": str(self._spec.world_size),
            "LOCAL_WORLD_SIZE": str(self._spec.devices_per_node),
            # without it DeepSpeed starts numactl at every reduction of stage 3 on a CPU, to count devices
            "LOCAL_SIZE": str(self._spec.devices_per_node),
            "MASTER_ADDR": rendezvous.host,
            "MASTER_PORT": str(rendezvous.ranks_port),
            STARTED_AT: str(time.time()),
            "PYTHONUNBUFFERED": "1",
        }
        if self._circumstance.machine.device == "cpu":
            given["CUDA_VISIBLE_DEVICES"] = ""  # no library may take a GPU that the run is not about, AMD's neither
        return chosen | dict(os.environ) | given


def _list_ranks(spec: RunSpec, circumstance: Circumstance, span: Span, number: int) -> range:
    """Return the ranks of one of a run's supervisors; ranks are numbered node by node."""
    if circumstance.rehearsed_rank is not None:
        return range(circumstance.rehearsed_rank, circumstance.rehearsed_rank + 1)
    own = spec.devices_per_node if span == "node" else 1
    return range(number * own, (number + 1) * own)


class NodeAgent:
    """One following node of one attempt."""

    def __init__(
        self,
        folder: Path,
        number: int,
        rendezvous: Rendezvous | None = None,
        *,
        span: Span = "node",
        start: StartRank = start_process,
        handle_signals: bool = True,
    ) -> None:
        """`number` is this supervisor's among those of the run. Without a `rendezvous` it waits for the lead's file."""
        spec = RunSpec.model_validate_json((folder / store.SPEC).read_bytes())
        circumstance = Circumstance.model_validate_json((folder / store.CIRCUMSTANCE).read_bytes())
        self._output: list[tuple[int, str]] = []
        self.node = NodeRanks(folder, spec, circumstance, number, self._collect_output, span, start)
        self.rendezvous = rendezvous or Rendezvous.wait(folder, circumstance.limits.startup_s)
        self.client = AgentClient(self.rendezvous, number, socket.gethostname(), circumstance.limits.agent_silence_s)
        self._interrupted_by: int | None = None
        if handle_signals:
            install_handlers(self.interrupt)

    def run(self) -> bool:
        """Return whether every rank of this node ended as it should."""
        try:
            self.node.start(self.rendezvous, None)
            stacks = self._watch()
            if self._interrupted_by:
                self._report()  # before it ends its ranks, so that the lead does not take that for a loss
            self.node.end(stacks=stacks)
            self._report(done=True)
        except BaseException:
            self.node.end(stacks=False)  # and says nothing more: the lead sees a node that is lost
            raise
        finally:
            self.client.close()
            self.node.close()
        return not self.node.lost

    def interrupt(self, number: int) -> None:
        """End this node's ranks because of a signal; the lead hears of it. A signal handler may call this."""
        self._interrupted_by = number

    def _watch(self) -> bool:
        """Return when the ranks have ended or are to be ended; True if they are to print their stacks first."""
        is_loss_reported = False
        while self.node.running and not self._interrupted_by:
            time.sleep(POLL_S)
            paused = self.node.look_for_pauses() > 0
            if paused:
                self.client.forgive_silence()
            if order := self.client.stop_request():
                return bool(order["stacks"])
            self.node.drain()
            if self.client.due() or paused or (self.node.lost and not is_loss_reported):
                self._report()
                is_loss_reported = self.node.lost
        return False

    def _report(self, *, done: bool = False) -> None:
        paused = self.node.pauses.totals
        self.client.report(
            self.node.states(), self._output, done=done, interrupted_by=self._interrupted_by, paused=paused
        )
        self._output = []

    def _collect_output(self, rank: int, line: bytes) -> None:
        self._output.append((rank, line.decode(errors="replace")))
