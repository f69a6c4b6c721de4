"""Start, monitoring and end of all ranks of one supervisor. `NodeAgent` is the supervisor of any node but node 0."""

import os
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from bench import engines
from bench.core import store
from bench.core.engine_facts import SCRATCH
from bench.core.processes import build_module_command
from bench.core.record import Circumstance, Network
from bench.core.scheduling import Span
from bench.core.spec import RunSpec
from bench.measure.channel import LISTENER, PULSE, STACKS_SIGNAL, STARTED_AT, SharedHeartbeat, strip_folders
from bench.measure.control_group import count_oom_kills
from bench.measure.environment import choose_openmp_variables, find_device_kind
from bench.runtime import extensions
from bench.runtime.outcome import PauseWatch, RankState
from bench.runtime.process import RankProcess, StartRank, install_handlers, start_process
from bench.runtime.transport import AgentClient, Rendezvous

POLL_S = 0.2
# Time between SIGTERM and SIGKILL. On a busy file system, rank 0 takes some time to save its steps.
_TERMINATE_S = 8.0
# Time after SIGKILL for the kernel to end a rank.
_KILL_S = 5.0
# Time for every rank to print its stacks.
_STACKS_S = 2.0
_STACKS_CHARACTERS = 6000


def count_supervisors(spec: RunSpec, span: Span, circumstance: Circumstance | None = None) -> int:
    """Return the number of supervisors of a run: one per node, or one per rank if `span` is "device".

    `circumstance` describes how and where the run is started. If it names a rank to rehearse, this rank runs alone, and
    therefore has one supervisor.
    """
    if circumstance and circumstance.rehearsed_rank is not None:
        return 1
    return spec.nodes if span == "node" else spec.world_size


def build_rank_environment(
    device: str, devices_per_node: int, network: Network | None, rendezvous: Rendezvous, *, hides_gpus: bool
) -> dict[str, str]:
    """Return the environment variables that the ranks of a node have in common. `network` is None if all ranks are on
    this machine.

    The user's variables take precedence over zeroscale's defaults. Variables that zeroscale must set take precedence
    over the user's variables.
    """
    chosen = choose_openmp_variables(device, devices_per_node)
    if network is None:
        # The loopback interface also works if the host's name does not resolve.
        chosen["GLOO_SOCKET_IFNAME"] = "lo"
    elif network.interface:
        chosen |= {"GLOO_SOCKET_IFNAME": network.interface, "NCCL_SOCKET_IFNAME": network.interface}
    given = {
        "MASTER_ADDR": rendezvous.host,
        "MASTER_PORT": str(rendezvous.ranks_port),
        "PYTHONUNBUFFERED": "1",
        # An empty list hides GPUs from all libraries, including AMD's.
        **({"CUDA_VISIBLE_DEVICES": ""} if hides_gpus else {}),
    }
    return chosen | dict(os.environ) | given


class NodeRanks:
    """Ranks of one supervisor: all ranks of a node, or a single rank."""

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
        """Create the ranks without starting them.

        `number` is the index of this supervisor among the supervisors of the run. `write(rank, line)` is called with
        each line of a rank's output. `span` is "node" for the ranks of a node, or "device" for a single rank. `start`
        starts the process of a rank.
        """
        self._folder, self._spec, self._circumstance, self._write = folder, spec, circumstance, write
        self._rehearsed, self._start = circumstance.rehearsed_rank, start
        own = spec.devices_per_node if span == "node" else 1
        # Ranks are numbered node by node. A rehearsal has one rank.
        self._first, self._count = (number * own, own) if self._rehearsed is None else (self._rehearsed, 1)
        self._heartbeat = SharedHeartbeat.create(spec.devices_per_node)
        self._ranks: list[RankProcess] = []
        self._facts = engines.find_facts(spec)  # None: an engine that is not installed here fails in the ranks
        self._scratch_name = f"zeroscale-{uuid.uuid4().hex[:12]}"
        self.pauses = PauseWatch()
        self._oom_kills = count_oom_kills()

    def start(self, rendezvous: Rendezvous, listener: socket.socket | None) -> None:
        """Start every rank. Rank 0 inherits the socket `listener`, to which the other ranks connect."""
        environment = self._build_environment(rendezvous)
        command = build_module_command("bench.runtime.worker", str(self._folder))
        for rank in range(self._first, self._first + self._count):
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
        """True if a rank has ended with an error."""
        return any(rank.exit_code for rank in self._ranks)

    def states(self) -> list[RankState]:
        """Return the current state of every rank of this supervisor."""
        now, host = time.monotonic(), socket.gethostname()
        # The kernel's counter is a file, so it is read only if a rank was killed.
        killed = any(rank.exit_code == -signal.SIGKILL for rank in self._ranks)
        oom_kills = count_oom_kills() - self._oom_kills if killed else 0
        beats = [(rank, self._heartbeat.read(self._local_rank(rank.rank))) for rank in self._ranks]
        return [
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
                stacks=strip_folders(rank.stack_output.decode(errors="replace"))[-_STACKS_CHARACTERS:],
                host=host,
                oom_kills=oom_kills,
                survived=rank.survived,
            )
            for rank, progress in beats
        ]

    def detect_pauses(self) -> float:
        """Return the seconds for which this supervisor was paused (for example by SIGSTOP) since the last call; 0 if it
        was not."""
        running = [rank for rank in self._ranks if rank.exit_code is None]
        in_steps = any(self._heartbeat.read(self._local_rank(rank.rank)).step >= 0 for rank in running)
        return self.pauses.sample([rank.process.pid for rank in running], in_steps=in_steps)

    def drain(self) -> None:
        """Read the output that the ranks have written so far."""
        for rank in self._ranks:
            rank.drain(self._write)

    def end(self, *, stacks: bool) -> None:
        """End all running ranks, first with SIGTERM and then with SIGKILL.

        If `stacks` is true, all ranks print their stacks before they are ended. A rank in an uninterruptible system
        call, for example into a driver or to a lost file server, survives SIGKILL. This method does not wait for such a
        rank.
        """
        if stacks:
            for rank in self._ranks:
                rank.listening = True
                rank.signal(STACKS_SIGNAL)
            self._wait(_STACKS_S)
        for rank in self._ranks:
            if rank.exit_code is None:
                rank.stopped = True
                rank.signal(signal.SIGTERM)
                # A stopped process handles no signal.
                rank.signal(signal.SIGCONT)
        self._wait(_TERMINATE_S)
        for rank in self._ranks:
            rank.signal(signal.SIGKILL)
        self._wait(_KILL_S)
        for rank in self._ranks:
            rank.survived = rank.exit_code is None
        self.drain()

    def close(self) -> None:
        """Close the pipes and the shared heartbeat, and remove the files that the ranks have written to local disks.

        Without this, a supervisor of many runs would run out of file descriptors.
        """
        for rank in self._ranks:
            rank.close()
        os.close(self._heartbeat.descriptor)
        for folder in self._facts.scratch if self._facts else ():
            shutil.rmtree(Path(folder, self._scratch_name), ignore_errors=True)

    def _local_rank(self, rank: int) -> int:
        """Return the local rank, which is also the number of the rank's device; 0 in a rehearsal, which runs one rank
        alone."""
        return 0 if self._rehearsed is not None else rank % self._spec.devices_per_node

    def _wait(self, seconds: float) -> None:
        """Wait until all ranks have ended, but at most for `seconds`."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and self.running:
            time.sleep(POLL_S / 5)
            self.drain()

    def _build_environment(self, rendezvous: Rendezvous) -> dict[str, str]:
        """Return the environment variables of the ranks, without RANK and LOCAL_RANK, which differ between ranks."""
        spec, circumstance = self._spec, self._circumstance
        given = "cpu" if circumstance.shapes_only else circumstance.machine.device
        device, per_node = given or find_device_kind(), spec.devices_per_node
        network = None if spec.nodes == 1 or self._rehearsed is not None else self._circumstance.network
        common = build_rank_environment(device, per_node, network, rendezvous, hides_gpus=given == "cpu")
        operations = self._facts.compiled_ops if self._facts else ()
        own = {
            "WORLD_SIZE": str(spec.world_size),
            "LOCAL_WORLD_SIZE": str(per_node),
            # Without this variable, DeepSpeed counts devices with numactl at every reduction of stage 3 on a CPU.
            "LOCAL_SIZE": str(per_node),
            STARTED_AT: str(time.time()),
            SCRATCH: self._scratch_name,
        }
        usual = {"TOKENIZERS_PARALLELISM": "false"} | extensions.build_environment(operations, device, os.environ)
        return usual | common | own


class NodeAgent:
    """Supervisor of a node other than node 0, in one attempt (one try at a run)."""

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
        """Create the supervisor and connect to node 0.

        `number` is the index of this supervisor among the supervisors of the run. `rendezvous` is the address of node
        0. If it is None, wait until node 0 has written its address into the folder. `span` says which ranks this
        supervisor starts: all ranks of its node, or the rank of one device. `start` is the function that starts a rank.
        With `handle_signals`, signals to this process end the ranks.
        """
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
        """Run the ranks of this node until they end. Return True if all ended without an error."""
        try:
            self.node.start(self.rendezvous, None)
            stacks = self._watch()
            if self._interrupted_by:
                # The signal is reported before the ranks end, so that node 0 does not regard the ranks as lost.
                self._report()
            self.node.end(stacks=stacks)
            self._report(done=True)
        except BaseException:
            # No report is sent, so that node 0 notices the loss of this node.
            self.node.end(stacks=False)
            raise
        finally:
            self.client.close()
            self.node.close()
        return not self.node.lost

    def interrupt(self, number: int) -> None:
        """Request that this node's ranks end after the signal `number`. The signal is also reported to node 0. A signal
        handler may call this method."""
        self._interrupted_by = number

    def _watch(self) -> bool:
        """Monitor the ranks until they have ended or must be ended.

        Return True if node 0 requested that the ranks print their stacks before they are ended.
        """
        is_loss_reported = False
        while self.node.running and not self._interrupted_by:
            time.sleep(POLL_S)
            paused = self.node.detect_pauses() > 0
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
        facts = {"done": done, "interrupted_by": self._interrupted_by, "paused": self.node.pauses.totals}
        self.client.report(self.node.states(), self._output, **facts)
        self._output = []

    def _collect_output(self, rank: int, line: bytes) -> None:
        self._output.append((rank, line.decode(errors="replace")))
