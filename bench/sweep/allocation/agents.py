"""The other supervisors of an allocation: the leader's lines to them, and what each of them does.

The leader tells them which point to run, and they report that they are ready for the next. They meet at a port that the
leader writes into the job's folder. All tasks of an array share that folder, and a job that was put back into the queue
finds it as it was, so the file has the name of its allocation, and whoever comes has to be of the same one.
"""

import contextlib
import json
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from bench.core import store
from bench.core.files import is_disk_full
from bench.core.scheduling import JobContext
from bench.measure.environment import find_device_kind
from bench.runtime.node import NodeAgent
from bench.runtime.process import ForkServer
from bench.runtime.transport import Connection, Rendezvous, TokenListener
from bench.sweep import jobs

_POLL_S = 0.1
_READY_S = 30.0  # after a point, for a node's ranks to be gone
_RESTART_S = 300.0  # for a fork server's imports
_ORDERS_POLL_S = 0.05


def build_meeting_path(folder: Path, allocation: str) -> Path:
    """Return the file in a job's folder that says where the supervisors of one of its allocations meet."""
    return folder / f"meeting-{allocation}.json"


class JobAgents:
    """The conductor's side: one line to every other supervisor of the allocation."""

    def __init__(
        self,
        count: int,
        host: str,
        folder: Path,
        allocation: str,
        patience_s: float,
        is_over: Callable[[], bool] = bool,
    ) -> None:
        """`host` is where this supervisor is found; `allocation` names what no other start of any job has. TimeoutError
        if not all come in time, or if the caller has been asked to end meanwhile."""
        self._connections: dict[int, Connection] = {}
        self.hosts: dict[int, str] = {}
        self._count, self._allocation = count, allocation
        if count:
            self._gather(host, build_meeting_path(folder, allocation), patience_s, is_over)

    def _gather(self, host: str, meeting_path: Path, patience_s: float, is_over: Callable[[], bool]) -> None:
        listener, until = TokenListener(self._count), time.monotonic() + patience_s
        try:
            point = {"host": host, "port": listener.port, "token": listener.token}
            store.write_atomically(meeting_path, json.dumps(point).encode(), mode=0o600)
            while len(self._connections) < self._count:
                for connection, hello in listener.accept_known():
                    self._accept(connection, hello)
                if time.monotonic() > until or is_over():
                    missing = sorted(set(range(1, self._count + 1)) - set(self._connections))
                    raise TimeoutError(f"supervisors {missing} did not come within {patience_s:.0f} s")
                time.sleep(_POLL_S)
        finally:
            listener.close()
            meeting_path.unlink(missing_ok=True)

    def _accept(self, connection: Connection, hello: dict[str, Any]) -> None:
        """Take one who knows the token in, unless it is of another allocation: what it would measure is not ours."""
        number, host = int(hello["number"]), str(hello["host"])
        if hello.get("allocation") == self._allocation:
            self._connections[number], self.hosts[number] = connection, host
        else:
            connection.close()
            refused = f"{host} was turned away: it is of allocation {hello.get('allocation')}, and this is"
            print(refused, self._allocation, file=sys.stderr, flush=True)

    def run(self, folder: Path, point: Rendezvous) -> None:
        """Have every member run the attempt in `folder`."""
        for connection in self._connections.values():
            connection.send({"run": str(folder), "point": point._asdict()})

    def wait(self) -> list[str]:
        """Wait until every member is ready for the next point, also those that start their fork server again; return
        the hosts that do not answer any more."""
        until, busy = time.monotonic() + _READY_S, set(self._connections)
        while busy and time.monotonic() < until:
            for number in list(busy):
                messages = self._connections[number].take()
                if any("restarting" in message for message in messages):
                    until = time.monotonic() + _RESTART_S
                if any("ready" in message for message in messages) or self._connections[number].closed:
                    busy.discard(number)
            time.sleep(_POLL_S)
        return [
            self.hosts[number]
            for number, connection in self._connections.items()
            if connection.closed or number in busy
        ]

    def send_end(self) -> None:
        """Send everybody home."""
        for connection in self._connections.values():
            connection.send({"end": True})


def join_leader(
    folder: Path, allocation: str, number: int, host: str, patience_s: float, is_over: Callable[[], bool] = bool
) -> Connection:
    """Join the conductor of an allocation of the job in `folder`; TimeoutError if there is none in time, or if the
    caller has been asked to end meanwhile."""
    until, meeting_path = time.monotonic() + patience_s, build_meeting_path(folder, allocation)
    while True:
        try:
            point: dict[str, Any] = json.loads(meeting_path.read_bytes())
            connection = Connection(socket.create_connection((point["host"], point["port"]), timeout=10))
        except (OSError, ValueError) as error:  # not there yet
            if time.monotonic() > until or is_over():
                raise TimeoutError(f"the first node could not be reached within {patience_s:.0f} s") from error
            time.sleep(_POLL_S)
        else:
            connection.send({"token": point["token"], "allocation": allocation, "number": number, "host": host})
            return connection


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
                time.sleep(_ORDERS_POLL_S)
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
