"""TCP connections between the supervisors of a run. The supervisor of node 0 is the coordinator. The supervisors of the
other nodes are its agents, and report to it.

A rank reports a failure only to the supervisor of its own node. Each agent therefore reports its ranks to node 0, and
only node 0 decides how the run ends. The operating system chooses the port on which node 0 listens, so ports cannot
collide. Node 0 writes the port into the run's folder, where the agents read it.

Connections carry JSON objects, one per line. The port is open to the whole network. Every client must first send the
token, which is in a file that only the job's user can read. Until then the client is unknown. It occupies a file
descriptor and a kilobyte of memory, and is disconnected after a few seconds. Nothing that an unknown client sends can
end the run.
"""

import contextlib
import json
import math
import secrets
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from bench.core import store
from bench.runtime.outcome import PauseTotals, RankState

_QUIET_S = 1.0
_HELLO_BYTES = 1024
# Seconds within which a client must send the token. Supervisors send it as soon as they are connected.
_HELLO_S = 5.0
# Maximum number of unknown clients at a time, in addition to the expected clients.
_MAX_UNKNOWN = 16
_RENDEZVOUS_POLL_S = 0.2
_REPORT_S = 1.0
_FLUSH_S = 5.0


class Connection:
    """Non-blocking connection that carries JSON objects, one per line."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self._socket, self._in, self._out = connection, bytearray(), bytearray()
        self._sent_at = self.heard_at = self.began_at = time.monotonic()
        self.closed = False

    def send(self, message: dict[str, Any]) -> None:
        self._sent_at = time.monotonic()
        self._out += json.dumps(message).encode() + b"\n"
        self.flush()

    def keep_alive(self) -> None:
        """Send an empty message if no message was sent for a second. The message shows the peer that the connection
        works."""
        if time.monotonic() - self._sent_at >= _QUIET_S:
            self.send({})
        self.flush()

    def flush(self) -> None:
        """Send as many waiting bytes as the network accepts without blocking. The remaining bytes are sent by the next
        call."""
        try:
            while self._out and not self.closed:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            pass  # the network accepts no more now
        except OSError:
            self.closed = True

    def hello(self) -> dict[str, Any] | None:
        """Return the first message of a new client; None if it has not arrived yet.

        The connection is closed if the first line is too long or is not JSON. This method never reads more than the
        maximum length of a first message. Later messages remain for `take`.
        """
        self._receive(_HELLO_BYTES - len(self._in))
        line, end, rest = bytes(self._in).partition(b"\n")
        if not end:
            self.closed = self.closed or len(line) >= _HELLO_BYTES
            return None
        self._in[:] = rest
        return next(iter(self._parse([line])), None)

    def take(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived. Set `closed` to true if no more messages can arrive."""
        while self._receive(1 << 16):
            pass
        *lines, rest = bytes(self._in).split(b"\n")
        self._in[:] = rest
        return self._parse(lines)

    def _receive(self, max_bytes: int) -> bool:
        """Read up to `max_bytes`. Return True if more bytes may be available."""
        if self.closed:
            return False
        try:
            chunk = self._socket.recv(max_bytes)
        except BlockingIOError:
            return False  # no more for now
        except OSError:
            chunk = b""
        self.closed = not chunk
        self._in += chunk
        self.heard_at = time.monotonic()
        return bool(chunk)

    def _parse(self, lines: list[bytes]) -> list[dict[str, Any]]:
        try:
            return [dict(json.loads(line)) for line in lines]
        except Exception:  # e.g. bytes of a port scanner; deep nesting raises RecursionError
            self.closed = True
            return []

    def close(self, patience_s: float = 0.0) -> None:
        """Close the connection. Before that, wait at most `patience_s` seconds until all messages are sent."""
        until = time.monotonic() + patience_s
        while self._out and not self.closed and time.monotonic() < until:
            time.sleep(patience_s / 100)
            self.flush()
        if patience_s:
            # Read all input first. TCP resets a connection that is closed with unread input, and its output is lost.
            self.take()
        self.closed = True
        self._socket.close()


class TokenListener:
    """Listening port for the other supervisors of a job, with the token by which they identify themselves."""

    def __init__(self, awaited: int) -> None:
        self._max_waiting = awaited + _MAX_UNKNOWN
        self._server = socket.create_server(("", 0), backlog=self._max_waiting)
        self._server.setblocking(False)
        self._unknown: list[Connection] = []
        self.token = secrets.token_hex(8)

    @property
    def port(self) -> int:
        return int(self._server.getsockname()[1])

    def accept_known(self) -> list[tuple[Connection, dict[str, Any]]]:
        """Return the clients that have sent the token since the last call, each with its first message.

        A client is disconnected if its first message has no valid token, or if it sends nothing for too long.
        """
        for _ in range(self._max_waiting):
            try:
                self._unknown.append(Connection(self._server.accept()[0]))
            except OSError:  # no client is waiting, or no file descriptor is free
                break
        known, waiting, now = [], [], time.monotonic()
        for connection in self._unknown:
            hello = connection.hello()
            # The comparison takes constant time, so that the token cannot be guessed byte by byte.
            if hello and secrets.compare_digest(str(hello.get("token")).encode(), self.token.encode()):
                known.append((connection, hello))
            elif hello is None and not connection.closed and now - connection.began_at < _HELLO_S:
                waiting.append(connection)
            else:
                connection.close()
        for connection in waiting[: -self._max_waiting]:
            connection.close()
        self._unknown = waiting[-self._max_waiting :]
        return known

    def close(self) -> None:
        """Stop listening, and disconnect all clients that have not sent the token."""
        for connection in self._unknown:
            connection.close()
        self._unknown = []
        self._server.close()


class Rendezvous(NamedTuple):
    """Address of node 0, through which supervisors and ranks find each other. It is stored in `rendezvous.json`, which
    is removed when the run has ended."""

    host: str
    ranks_port: int  # port of torch's store, through which the ranks find each other
    crew_port: int
    token: str  # of this attempt; prevents that an agent reports to another process on this port

    def write(self, folder: Path) -> None:
        store.write_atomically(folder / store.RENDEZVOUS, json.dumps(self._asdict()).encode(), mode=0o600)

    @classmethod
    def wait(cls, folder: Path, timeout_s: float) -> "Rendezvous":
        """Wait until node 0 has written its address, and return it; raise TimeoutError after `timeout_s` seconds."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError):
                return cls(**json.loads((folder / store.RENDEZVOUS).read_text()))
            time.sleep(_RENDEZVOUS_POLL_S)
        raise TimeoutError(f"node 0 did not write its address within {timeout_s:.0f} s")


class AgentReport(NamedTuple):
    """State of another node as reported by its agent."""

    ranks: list[RankState] = []
    done: bool = False  # all ranks have ended, and this is the last report
    interrupted_by: int | None = None  # the signal that the agent received
    left: str = ""  # reason if the agent ended its ranks by itself
    paused: PauseTotals = PauseTotals()


class ConnectedAgent:
    """Connection from node 0 to the agent of another node."""

    def __init__(self, line: Connection, node: int, host: str) -> None:
        self.line, self.name = line, f"node {node} ({host})"
        self.heard_at = time.monotonic()
        self.last = AgentReport()

    @property
    def silent_s(self) -> float:
        """Seconds since the agent's last report; 0 after its final report."""
        return 0.0 if self.last.done else time.monotonic() - self.heard_at

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """Store the agent's latest report, and yield the output of its ranks as (rank, line)."""
        for message in self.line.take():
            self.heard_at = time.monotonic()
            output = message.pop("output")
            ranks = [RankState(**state) for state in message.pop("ranks")]
            self.last = AgentReport(ranks, paused=PauseTotals(*message.pop("paused")), **message)
            yield from ((int(rank), str(line).encode()) for rank, line in output)


class CoordinatorServer:
    """Node 0's side of the connections to all agents (supervisors of the other nodes). A run on a single node has no
    agents and opens no port."""

    def __init__(self, nodes: int, host: str, silence_s: float) -> None:
        """Create the server for a run with this number of nodes. `host` is the address of node 0.

        A node that sends no report for `silence_s` seconds counts as lost. The time limit is needed because a broken
        network link does not close a connection.
        """
        self.nodes, self.host, self._silence_s = nodes, host, silence_s
        self.agents: dict[int, ConnectedAgent] = {}
        self._began = time.monotonic()
        self._listener = TokenListener(nodes - 1) if nodes > 1 else None
        self.port = self._listener.port if self._listener else 0
        self.token = self._listener.token if self._listener else ""

    def poll(self) -> list[tuple[int, bytes]]:
        """Process the agents' new reports. Return the output of their ranks as (rank, line)."""
        for line, hello in self._listener.accept_known() if self._listener else ():
            node = int(hello["node"])
            self.agents[node] = ConnectedAgent(line, node, str(hello["host"]))
        output: list[tuple[int, bytes]] = []
        for agent in self.agents.values():
            output += agent.receive()
            agent.line.keep_alive()
        return output

    def lost(self) -> str | None:
        """Return the reason why a node is regarded as lost; None if no node is regarded as lost."""
        for agent in self.agents.values():
            if agent.line.closed and not agent.last.done:
                return f"{agent.name} closed its connection"
            if agent.silent_s > self._silence_s:
                return f"{agent.name} has sent no report for {agent.silent_s:.0f} s"
        return self.find_left()

    def find_left(self, quiet_s: float = math.inf) -> str | None:
        """Return a text about a node that has ended its ranks by itself, or that has been silent for `quiet_s` seconds.

        Return None if there is no such node. Such a node may explain why ranks of other nodes fail.
        """
        for agent in self.agents.values():
            if agent.last.left:
                return f"{agent.name} left: {agent.last.left}"
            if agent.silent_s > quiet_s:
                return f"{agent.name} has been silent for {agent.silent_s:.0f} s"
        return None

    def forgive_silence(self, paused_s: float) -> None:
        """Restart the time limit for silent nodes. Call this method after this supervisor was paused for `paused_s`
        seconds, because a paused supervisor receives no reports."""
        self._began += paused_s
        for agent in self.agents.values():
            agent.heard_at = time.monotonic()

    @property
    def paused(self) -> PauseTotals:
        """Seconds for which processes of the run were paused on the other nodes, for example by SIGSTOP. Each field of
        the result is the largest value that any of these nodes reported."""
        return PauseTotals().combine(*(agent.last.paused for agent in self.agents.values()))

    def find_absent(self, patience_s: float) -> str | None:
        """Return a text with the nodes that have not connected within `patience_s` seconds; None if there are none."""
        missing = [node for node in range(1, self.nodes) if node not in self.agents]
        if missing and time.monotonic() - self._began > patience_s:
            return f"nodes {missing} did not connect within {patience_s:.0f} s"
        return None

    @property
    def interrupted_by(self) -> int | None:
        """Number of the signal that an agent received; None if no agent received one."""
        return next(filter(None, (agent.last.interrupted_by for agent in self.agents.values())), None)

    def request_stop(self, *, stacks: bool) -> None:
        """Request that every agent ends its ranks. If `stacks` is true, the ranks print their stacks first."""
        for agent in self.agents.values():
            agent.line.send({"stop": True, "stacks": stacks})

    def close(self) -> None:
        """Close all connections and the port."""
        for agent in self.agents.values():
            agent.line.close()
        if self._listener:
            self._listener.close()


class AgentClient:
    """Agent's side of the connection to node 0. An agent is the supervisor of another node."""

    def __init__(self, rendezvous: Rendezvous, node: int, host: str, silence_s: float) -> None:
        """Connect to node 0. `node` and `host` are the number and the host name of this agent's own node.

        Node 0 is regarded as lost if it sends nothing for `silence_s` seconds.
        """
        self._silence_s, self._left = silence_s, ""
        self._connection = Connection(socket.create_connection((rendezvous.host, rendezvous.crew_port), timeout=30))
        self._connection.send({"token": rendezvous.token, "node": node, "host": host})
        self._reported_at = -_REPORT_S

    def due(self) -> bool:
        """Send the rest of the last report, if a part of it is not sent yet. Return True if the next report is due."""
        self._connection.flush()
        return time.monotonic() - self._reported_at >= _REPORT_S

    def report(self, ranks: list[RankState], output: list[tuple[int, str]], **facts: Any) -> None:
        """Report this node's ranks to node 0. `ranks` has the states of these ranks, and `output` has their output
        lines as pairs (rank, line). `facts` are the fields `done`, `interrupted_by` and `paused` of `AgentReport`."""
        self._reported_at = time.monotonic()
        states = [state._asdict() for state in ranks]
        self._connection.send({"ranks": states, "output": output, "left": self._left, **facts})

    def forgive_silence(self) -> None:
        """Restart the time limit for a silent node 0. Call this method after this supervisor was paused, because a
        paused supervisor receives no messages."""
        self._connection.heard_at = time.monotonic()

    def stop_request(self) -> dict[str, Any] | None:
        """Return node 0's request to stop; None if there is no request. If node 0 is lost, return a request to stop
        without printing stacks."""
        if orders := [message for message in self._connection.take() if message]:
            return orders[-1]
        silent_s = time.monotonic() - self._connection.heard_at
        if not self._connection.closed and silent_s > self._silence_s:
            self._left = f"it has received nothing from node 0 for {silent_s:.0f} s"
        return {"stop": True, "stacks": False} if self._connection.closed or self._left else None

    def close(self) -> None:
        """Close the connection after the last report has been sent."""
        self._connection.close(_FLUSH_S)
