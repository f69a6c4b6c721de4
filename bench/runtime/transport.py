"""Connections between the supervisors of one run: node 0 leads, the other nodes' agents report to it over TCP.

A rank reports its failure to its own node's supervisor only. So every node reports its ranks to node 0, which alone
decides how the run ends. Node 0 listens on a port that the system chooses, and writes it into the run's folder: no port
has to be agreed on, and none can collide.

Connections carry JSON objects, one per line. The port is open to the whole network. A client is unknown until it has
sent the token, which is in a file that only the job's user can read. An unknown client costs a descriptor and a
kilobyte for a few seconds, and nothing that it sends can end the run.
"""

import contextlib
import functools
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
# Clients with the token send it as soon as they are connected.
_HELLO_S = 5.0
# Unknown clients at a time, in addition to the awaited ones.
_MAX_UNKNOWN = 16
_RENDEZVOUS_POLL_S = 0.2
_REPORT_S = 1.0
_FLUSH_S = 5.0


class Connection:
    """One connection: JSON objects, one per line, sent and received without waiting."""

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
        """Send an empty message if none was sent for a second, so that the peer knows that the link works."""
        if time.monotonic() - self._sent_at >= _QUIET_S:
            self.send({})
        self.flush()

    def flush(self) -> None:
        """Send what the network accepts now; the rest waits for the next call."""
        try:
            while self._out and not self.closed:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            pass  # the network accepts no more now
        except OSError:
            self.closed = True

    def hello(self) -> dict[str, Any] | None:
        """Return the first message once it has arrived, and close a connection whose first line is no hello.

        No more bytes are read than a hello may have; later messages are left for `take`.
        """
        self._receive(_HELLO_BYTES - len(self._in))
        line, end, rest = bytes(self._in).partition(b"\n")
        if not end:
            self.closed = self.closed or len(line) >= _HELLO_BYTES
            return None
        self._in[:] = rest
        return next(iter(self._parse([line])), None)

    def take(self) -> list[dict[str, Any]]:
        """Return the messages that have arrived; `closed` is set once no more can arrive."""
        while self._receive(1 << 16):
            pass
        *lines, rest = bytes(self._in).split(b"\n")
        self._in[:] = rest
        return self._parse(lines)

    def _receive(self, max_bytes: int) -> bool:
        """Read up to `max_bytes`; return whether there may be more."""
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
        except Exception:  # from a port scanner, say; deep nesting raises RecursionError
            self.closed = True
            return []

    def close(self, patience_s: float = 0.0) -> None:
        """Close the connection, after waiting at most `patience_s` for messages to be sent."""
        until = time.monotonic() + patience_s
        while self._out and not self.closed and time.monotonic() < until:
            time.sleep(patience_s / 100)
            self.flush()
        if patience_s:
            # A connection that is closed with unread input is reset, and loses its output.
            self.take()
        self.closed = True
        self._socket.close()


class TokenListener:
    """A port for the other supervisors of a job, and the token that identifies them."""

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
        """Return the clients that have sent the token since the last call, each with its hello.

        Other clients are disconnected as soon as they send something else, or nothing for too long.
        """
        for _ in range(self._max_waiting):
            try:
                self._unknown.append(Connection(self._server.accept()[0]))
            except OSError:  # no client waits; or no descriptor is free until an unknown client's time is over
                break
        known, waiting, now = [], [], time.monotonic()
        for connection in self._unknown:
            hello = connection.hello()
            # In constant time, so that the token cannot be guessed byte by byte.
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
        """Stop listening, and disconnect every unknown client."""
        for connection in self._unknown:
            connection.close()
        self._unknown = []
        self._server.close()


class Rendezvous(NamedTuple):
    """Address of node 0: `rendezvous.json`, which is removed when the run has ended."""

    host: str
    ranks_port: int  # of the store through which the ranks find each other
    crew_port: int
    token: str  # of this attempt, so that no agent reports to another process that got the same port

    def write(self, folder: Path) -> None:
        store.write_atomically(folder / store.RENDEZVOUS, json.dumps(self._asdict()).encode(), mode=0o600)

    @classmethod
    def wait(cls, folder: Path, timeout_s: float) -> "Rendezvous":
        """Return the address once node 0 has written it; raise TimeoutError after `timeout_s`."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError):
                return cls(**json.loads((folder / store.RENDEZVOUS).read_text()))
            time.sleep(_RENDEZVOUS_POLL_S)
        raise TimeoutError(f"node 0 did not write its address within {timeout_s:.0f} s")


class AgentReport(NamedTuple):
    """State of another node, as its agent reports it."""

    ranks: list[RankState] = []
    done: bool = False  # all ranks have ended, and this is the last report
    interrupted_by: int | None = None  # the signal that the agent received
    left: str = ""  # why the agent ended its ranks by itself
    paused: PauseTotals = PauseTotals()


class ConnectedAgent:
    """Another node as seen from node 0."""

    def __init__(self, line: Connection, node: int, host: str) -> None:
        self.line, self.name = line, f"node {node} ({host})"
        self.heard_at = time.monotonic()
        self.last = AgentReport()

    @property
    def silent_s(self) -> float:
        """Seconds since its last report; 0 for an agent that has sent its last."""
        return 0.0 if self.last.done else time.monotonic() - self.heard_at

    def receive(self) -> Iterator[tuple[int, bytes]]:
        """Keep its last report; yield its ranks' output as (rank, line)."""
        for message in self.line.take():
            self.heard_at = time.monotonic()
            output = message.pop("output")
            ranks = [RankState(**state) for state in message.pop("ranks")]
            self.last = AgentReport(ranks, paused=PauseTotals(*message.pop("paused")), **message)
            yield from ((int(rank), str(line).encode()) for rank, line in output)


class CoordinatorServer:
    """Node 0's side. With a single node there are no agents, and nothing listens."""

    def __init__(self, nodes: int, host: str, silence_s: float) -> None:
        """A node without a report for `silence_s` is lost: a link that was cut closes no connection."""
        self.nodes, self.host, self._silence_s = nodes, host, silence_s
        self.agents: dict[int, ConnectedAgent] = {}
        self._began = time.monotonic()
        self._listener = TokenListener(nodes - 1) if nodes > 1 else None
        self.port = self._listener.port if self._listener else 0
        self.token = self._listener.token if self._listener else ""

    def poll(self) -> list[tuple[int, bytes]]:
        """Apply the agents' reports; return their ranks' output as (rank, line)."""
        for line, hello in self._listener.accept_known() if self._listener else ():
            node = int(hello["node"])
            self.agents[node] = ConnectedAgent(line, node, str(hello["host"]))
        output: list[tuple[int, bytes]] = []
        for agent in self.agents.values():
            output += agent.receive()
            agent.line.keep_alive()
        return output

    def lost(self) -> str | None:
        """Return why a node counts as lost, or None."""
        for agent in self.agents.values():
            if agent.line.closed and not agent.last.done:
                return f"{agent.name} closed its connection"
            if agent.silent_s > self._silence_s:
                return f"{agent.name} has sent no report for {agent.silent_s:.0f} s"
        return self.find_left()

    def find_left(self, quiet_s: float = math.inf) -> str | None:
        """Return the node that ended its ranks because it lost node 0, or that is silent for `quiet_s`; None if none.

        When a node leaves, the other nodes' ranks fail too.
        """
        for agent in self.agents.values():
            if agent.last.left:
                return f"{agent.name} left: {agent.last.left}"
            if agent.silent_s > quiet_s:
                return f"{agent.name} has been silent for {agent.silent_s:.0f} s"
        return None

    def forgive_silence(self, paused_s: float) -> None:
        """Count every node's silence from now on: this supervisor was paused, and received nothing."""
        self._began += paused_s
        for agent in self.agents.values():
            agent.heard_at = time.monotonic()

    @property
    def paused(self) -> PauseTotals:
        """The longest pause of another node."""
        return functools.reduce(
            PauseTotals.combine, (agent.last.paused for agent in self.agents.values()), PauseTotals()
        )

    def find_absent(self, patience_s: float) -> str | None:
        """Return the nodes that have not connected within `patience_s`, or None."""
        missing = [node for node in range(1, self.nodes) if node not in self.agents]
        if missing and time.monotonic() - self._began > patience_s:
            return f"nodes {missing} did not connect within {patience_s:.0f} s"
        return None

    @property
    def interrupted_by(self) -> int | None:
        """The signal that an agent received."""
        return next(filter(None, (agent.last.interrupted_by for agent in self.agents.values())), None)

    def request_stop(self, *, stacks: bool) -> None:
        """Have every agent end its ranks, which first print their stacks if `stacks`."""
        for agent in self.agents.values():
            agent.line.send({"stop": True, "stacks": stacks})

    def close(self) -> None:
        """Close all connections."""
        for agent in self.agents.values():
            agent.line.close()
        if self._listener:
            self._listener.close()


class AgentClient:
    """Another node's side of the connection to node 0."""

    def __init__(self, rendezvous: Rendezvous, node: int, host: str, silence_s: float) -> None:
        """If node 0 sends nothing for `silence_s`, it is lost."""
        self._silence_s, self._left = silence_s, ""
        self._connection = Connection(socket.create_connection((rendezvous.host, rendezvous.crew_port), timeout=30))
        self._connection.send({"token": rendezvous.token, "node": node, "host": host})
        self._reported_at = -_REPORT_S

    def due(self) -> bool:
        """Send the rest of the last report; return whether it is time for the next one."""
        self._connection.flush()
        return time.monotonic() - self._reported_at >= _REPORT_S

    def report(self, ranks: list[RankState], output: list[tuple[int, str]], **facts: Any) -> None:
        """Send the states and output of this node's ranks; `facts` are `done`, `interrupted_by` and `paused`."""
        self._reported_at = time.monotonic()
        states = [state._asdict() for state in ranks]
        self._connection.send({"ranks": states, "output": output, "left": self._left, **facts})

    def forgive_silence(self) -> None:
        """Count node 0's silence from now on: this supervisor was paused, and received nothing."""
        self._connection.heard_at = time.monotonic()

    def stop_request(self) -> dict[str, Any] | None:
        """Return node 0's order to stop, if one came; the loss of node 0 counts as one."""
        if orders := [message for message in self._connection.take() if message]:
            return orders[-1]
        silent_s = time.monotonic() - self._connection.heard_at
        if not self._connection.closed and silent_s > self._silence_s:
            self._left = f"it has received nothing from node 0 for {silent_s:.0f} s"
        return {"stop": True, "stacks": False} if self._connection.closed or self._left else None

    def close(self) -> None:
        """Close the connection, after the last report has been sent."""
        self._connection.close(_FLUSH_S)
