"""Every supervisor of an allocation but the first."""

import contextlib
import signal
import socket
import sys
import time
from pathlib import Path
from types import FrameType

from bench.allocation.agents import join_leader
from bench.files import is_disk_full
from bench.measure.environment import find_device_kind
from bench.runtime.agent import NodeAgent
from bench.runtime.connection import Connection
from bench.runtime.fork_client import ForkServer
from bench.runtime.transport import Rendezvous
from bench.scheduling import JobContext
from bench.sweep import jobs

_POLL_S = 0.05


class JobAgent:
    """Runs what the conductor says, until it says no more or is gone."""

    def __init__(self, folder: Path, context: JobContext) -> None:
        self._job, self._context = jobs.read(folder), context
        first = self._job.points[0].circumstance
        self._folder, self._patience_s = folder, first.limits.startup_s
        self._agent: NodeAgent | None = None
        self._interrupted = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)
        self._server = ForkServer(first.machine.device or find_device_kind(), self._job.list_specs(context.task))

    def run(self) -> int:
        """Return 0 when the conductor has no more to do, or somebody has ended the allocation. srun ends with the
        highest code of all its tasks, so that a disk found full on any node is the job's reason."""
        try:
            return self._handle_orders()
        except OSError as error:  # the fork server is gone, say
            if not self._interrupted:
                print(f"{socket.gethostname()} leaves the allocation: {error}", file=sys.stderr, flush=True)
            return 0 if self._interrupted else jobs.EXIT_LATER if is_disk_full(error) else 1

    def _handle_orders(self) -> int:
        with contextlib.closing(self._server):
            self._server.wait_until_ready()
            place = self._context.allocation, self._context.number, socket.gethostname()
            connection = join_leader(self._folder, *place, self._patience_s, lambda: self._interrupted)
            while not self._interrupted and not connection.closed:
                for order in connection.take():
                    if "end" in order:
                        return 0
                    if "run" in order:
                        self._restart_server(connection)  # killed just now: a killed process takes a moment to end
                        self._run(Path(order["run"]), Rendezvous(**order["point"]))
                        self._restart_server(connection)  # already here, where no point's start-up has to wait for it
                        connection.send({"ready": True})
                time.sleep(_POLL_S)
        return 0 if self._interrupted else 1

    def _restart_server(self, connection: Connection) -> None:
        """Start the fork server again if it has ended, and say so: its imports take a while."""
        if self._server.has_ended and not self._interrupted:
            connection.send({"restarting": True})
            self._server.restart()

    def _run(self, folder: Path, rendezvous: Rendezvous) -> None:
        self._agent = NodeAgent(
            folder,
            self._context.number,
            rendezvous,
            span=self._job.span,
            start=self._server.start,
            handle_signals=False,
        )
        self._agent.run()
        self._agent = None
        self._server.reap()

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        self._interrupted = True
        if self._agent:
            self._agent.interrupt(number)
