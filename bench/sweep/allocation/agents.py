"""Agents of an allocation, and the leader's connections to them. The leader is the supervisor on the first node; an
agent is the supervisor on another node.

The leader sends the agents the next point (configuration) to run. An agent reports when it is ready for another point.

Agents connect to a port of the leader. The leader writes its address to a file in the job's folder, which all nodes
share. Without a shared folder, it writes an object of the same name in the object store. All tasks of a job array share
the job's folder, and a requeued job finds its old files there. The file name therefore contains the name of the
allocation, and the leader refuses agents of other allocations.
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
from bench.core.errors import UserError
from bench.core.files import is_disk_full
from bench.core.scheduling import JobContext, SchedulerUnavailable
from bench.core.study_store import StudyStore
from bench.measure.environment import find_device_kind
from bench.runtime.node import NodeAgent
from bench.runtime.process import ForkServer
from bench.runtime.transport import Connection, Rendezvous, TokenListener
from bench.sweep import jobs

_POLL_S = 0.1
_STORE_POLL_S = 1.0  # longer than `_POLL_S`, since each look into an object store is a request
_READY_S = 30.0  # seconds that a node's ranks may take to end after a point
_RESTART_S = 300.0  # seconds allowed for the imports of a restarted fork server
_ORDERS_POLL_S = 0.05


def build_meeting_path(folder: Path, allocation: str) -> Path:
    """Return the path of the file in a job's folder that holds the leader's address, to which the agents of an
    allocation connect."""
    return folder / f"meeting-{allocation}.json"


class JobAgents:
    """The leader's connections to the agents of its allocation, one to each agent."""

    def __init__(
        self,
        count: int,
        host: str,
        folder: Path,
        allocation: str,
        patience_s: float,
        is_over: Callable[[], bool] = bool,
        study: StudyStore | None = None,
    ) -> None:
        """Wait until all agents have connected. `count` is their number and `host` the leader's address. `allocation`
        is a name unique to this start of this job. `study` is the object store through which the nodes find each other;
        without it, they share `folder`.

        Raise TimeoutError if an agent is missing after `patience_s` seconds, or if `is_over` returns True before.
        """
        self._connections: dict[int, Connection] = {}
        self.hosts: dict[int, str] = {}
        self._count, self._allocation, self._study = count, allocation, study
        if count:
            self._gather(host, build_meeting_path(folder, allocation), patience_s, is_over)

    def _gather(self, host: str, meeting_path: Path, patience_s: float, is_over: Callable[[], bool]) -> None:
        listener, until = TokenListener(self._count), time.monotonic() + patience_s
        try:
            # Only the owner may read the file, since its token allows a connection to the port.
            point = {"host": host, "port": listener.port, "token": listener.token}
            store.write_atomically(meeting_path, json.dumps(point).encode(), mode=0o600)
            if self._study:
                self._study.push(meeting_path)
            while len(self._connections) < self._count:
                for connection, hello in listener.accept_known():
                    self._accept(connection, hello)
                if time.monotonic() > until or is_over():
                    missing = sorted(set(range(1, self._count + 1)) - set(self._connections))
                    raise TimeoutError(f"supervisors {missing} did not connect within {patience_s:.0f} s")
                time.sleep(_POLL_S)
        finally:
            listener.close()
            meeting_path.unlink(missing_ok=True)
            if self._study:
                with contextlib.suppress(UserError):
                    self._study.without_patience().remove(meeting_path)

    def _accept(self, connection: Connection, hello: dict[str, Any]) -> None:
        """Accept an agent that has sent the right token. If it belongs to another allocation, refuse it."""
        number, host = int(hello["number"]), str(hello["host"])
        if hello.get("allocation") == self._allocation:
            self._connections[number], self.hosts[number] = connection, host
        else:
            connection.close()
            refused = f"{host} was refused: it belongs to allocation {hello.get('allocation')}, but this allocation is"
            print(refused, self._allocation, file=sys.stderr, flush=True)

    def run(self, attempt: str, point: Rendezvous) -> None:
        """Send every agent the order to run an attempt (one try at a point). `attempt` is the folder of this attempt,
        relative to the study's folder. `point` is the address at which the supervisors of all nodes connect to each
        other for this attempt."""
        for connection in self._connections.values():
            connection.send({"run": attempt, "point": point._asdict()})

    def wait(self) -> list[str]:
        """Wait until every agent is ready for the next point (configuration). Return the hosts of agents that no longer
        respond.

        The wait is longer while an agent restarts its fork server, the process from which ranks are forked.
        """
        until, busy = time.monotonic() + _READY_S, set(self._connections)
        while busy and time.monotonic() < until:
            for number in list(busy):
                messages = self._connections[number].take()
                if any("restarting" in message for message in messages):
                    until = time.monotonic() + _RESTART_S
                if any("ready" in message for message in messages) or self._connections[number].closed:
                    busy.discard(number)
            time.sleep(_POLL_S)
        lost = (number for number, connection in self._connections.items() if connection.closed or number in busy)
        return [self.hosts[number] for number in lost]

    def send_end(self) -> None:
        """Send every agent the message that the job has ended."""
        for connection in self._connections.values():
            connection.send({"end": True})


def join_leader(
    folder: Path,
    allocation: str,
    number: int,
    host: str,
    patience_s: float,
    is_over: Callable[[], bool] = bool,
    study: StudyStore | None = None,
) -> Connection:
    """Connect to the leader of an allocation, as the agent with this number on this host, and return the connection.
    The leader's address is read from the job's `folder` or, with `study`, from its object store.

    Raise TimeoutError if no leader can be reached within `patience_s` seconds, or if `is_over` returns True before.
    """
    until, meeting_path = time.monotonic() + patience_s, build_meeting_path(folder, allocation)
    study = study.without_patience() if study else None
    while True:
        try:
            content = study.read(meeting_path) if study else meeting_path.read_bytes()
            point: dict[str, Any] = json.loads(content)
            connection = Connection(socket.create_connection((point["host"], point["port"]), timeout=10))
        except (OSError, ValueError, SchedulerUnavailable) as error:  # not there yet
            if time.monotonic() > until or is_over():
                raise TimeoutError(f"the first node could not be reached within {patience_s:.0f} s") from error
            time.sleep(_STORE_POLL_S if study else _POLL_S)
        else:
            connection.send({"token": point["token"], "allocation": allocation, "number": number, "host": host})
            return connection


class JobAgent:
    """Runs the ranks of its own node for each point (configuration) that the leader sends. It ends when the leader ends
    the job or the connection closes."""

    def __init__(self, folder: Path, context: JobContext, study: StudyStore | None = None) -> None:
        self._job, self._context, self._study = jobs.read(folder), context, study
        first = self._job.points[0].circumstance
        self._folder, self._patience_s = folder, first.limits.startup_s
        self._agent: NodeAgent | None = None
        self._interrupted = False
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)
        self._server = ForkServer(first.machine.device or find_device_kind(), self._job.list_specs(context.task))

    def run(self) -> int:
        """Run points until the job ends. Return 0 if the leader or a signal ended the job, `EXIT_LATER` if a disk is
        full, otherwise 1.

        srun exits with the highest exit code of its tasks. A full disk on any node therefore determines the job's exit
        code.
        """
        try:
            return self._handle_orders()
        except (OSError, UserError) as error:  # the fork server has died, for example
            if not self._interrupted:
                print(f"{socket.gethostname()} leaves the allocation: {error}", file=sys.stderr, flush=True)
            return 0 if self._interrupted else jobs.EXIT_LATER if is_disk_full(error) else 1

    def _handle_orders(self) -> int:
        with contextlib.closing(self._server):
            self._server.wait_until_ready()
            place = self._context.allocation, self._context.number, socket.gethostname()
            patience = self._patience_s, lambda: self._interrupted
            connection = join_leader(self._folder, *place, *patience, self._study)
            while not self._interrupted and not connection.closed:
                for order in connection.take():
                    if "end" in order:
                        return 0
                    if "run" in order:
                        self._restart_server(connection)  # if it was killed a moment ago
                        self._run(self._folder.parent.parent / order["run"], Rendezvous(**order["point"]))
                        self._restart_server(connection)  # before the next point's time begins
                        connection.send({"ready": True})
                time.sleep(_ORDERS_POLL_S)
        return 0 if self._interrupted else 1

    def _restart_server(self, connection: Connection) -> None:
        """Restart the fork server (the process from which ranks are forked) if it has ended. Report this to the leader,
        which then waits longer."""
        if self._server.has_ended and not self._interrupted:
            connection.send({"restarting": True})
            self._server.restart()

    def _run(self, folder: Path, rendezvous: Rendezvous) -> None:
        if self._study:
            self._study.pull_attempt(folder)
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
