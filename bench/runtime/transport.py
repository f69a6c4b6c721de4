"""How the supervisors of one run keep in touch: node 0's leads, the others report to it over TCP.

What a rank says of its failure reaches only its own node's supervisor; the others see a lost peer at best. So every
node reports its ranks to the lead, which alone decides how the run ends. The lead listens on a port that the system
gave it and writes it into the run's folder: nothing has to be agreed on beforehand, and no port can collide.

Connections carry JSON objects, one per line. The port is open to the whole network, so whoever connects is a stranger
until it has named the token, which stands in a file that only the job's own user can read. A stranger costs a
descriptor and a kilobyte for a few seconds, and nothing that it sends can end the run.
"""

import contextlib
import functools
import json
import math
import secrets
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench.core import store
from bench.runtime.outcome import PauseTotals, RankState

_QUIET_S = 1.0
_HELLO_BYTES = 1024
_HELLO_S = 5.0  # those who know the token say it as soon as they are connected
_MAX_UNKNOWN = 16  # at a time, besides as many as are awaited
_RENDEZVOUS_POLL_S = 0.2
_REPORT_S = 1.0
_FLUSH_S = 5.0


class Connection:
    """One connection: JSON objects, one per line, sent and taken without waiting."""

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
        """Send an empty message if there was none for a while, so that the other side knows the link is whole."""
        if time.monotonic() - self._sent_at >= _QUIET_S:
            self.send({})
        self.flush()

    def flush(self) -> None:
        """Send what the network takes now; the rest waits for the next call."""
        try:
            while self._out and not self.closed:
                del self._out[: self._socket.send(self._out)]
        except BlockingIOError:
            pass  # it takes no more now
        except OSError:
            self.closed = True

    def hello(self) -> dict[str, Any] | None:
        """Return the first message once it is there, reading no more than a hello may have; what follows it is for
        `take`. The line is closed where the first line is none of ours."""
        self._receive(_HELLO_BYTES - len(self._in))
        line, end, rest = bytes(self._in).partition(b"\n")
        if not end:
            self.closed = self.closed or len(line) >= _HELLO_BYTES
            return None
        self._in[:] = rest
        return next(iter(self._parse([line])), None)

    def take(self) -> list[dict[str, Any]]:
        """Return what has arrived; `closed` is set once nothing more can."""
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
            return False  # that was all for now
        except OSError:
            chunk = b""
        self.closed = not chunk
        self._in += chunk
        self.heard_at = time.monotonic()
        return bool(chunk)

    def _parse(self, lines: list[bytes]) -> list[dict[str, Any]]:
        try:
            return [dict(json.loads(line)) for line in lines]
        except Exception:  # a port scanner, say; deep nesting is a RecursionError
            self.closed = True
            return []

    @property
    def sending(self) -> bool:
        """Whether something has not been sent yet, and still can be."""
        return bool(self._out) and not self.closed

    def close(self) -> None:
        self.closed = True
        self._socket.close()


class TokenListener:
    """A port for the others of a job, and the token by which they are known."""

    def __init__(self, awaited: int) -> None:
        self._server = socket.create_server(("", 0), backlog=awaited + _MAX_UNKNOWN)
        self._server.setblocking(False)
        self._max_waiting = awaited + _MAX_UNKNOWN
        self._unknown: list[Connection] = []
        self.token = secrets.token_hex(8)

    @property
    def port(self) -> int:
        return int(self._server.getsockname()[1])

    def accept_known(self) -> list[tuple[Connection, dict[str, Any]]]:
        """Return those who have named the token since the last call, each with its hello; hang up on other strangers
        as soon as they said something else, or nothing for too long."""
        for _ in range(self._max_waiting):
            try:
                self._unknown.append(Connection(self._server.accept()[0]))
            except OSError:  # nobody waits; or no descriptor is free, until a stranger's time is over
                break
        known, waiting, now = [], [], time.monotonic()
        for line in self._unknown:
            hello = line.hello()
            if hello and secrets.compare_digest(str(hello.get("token")).encode(), self.token.encode()):
                known.append((line, hello))
            elif hello is None and not line.closed and now - line.began_at < _HELLO_S:
                waiting.append(line)
            else:
                line.close()
        for line in waiting[: -self._max_waiting]:
            line.close()
        self._unknown = waiting[-self._max_waiting :]
        return known

    def close(self) -> None:
        """Hang up on every stranger and admit nobody any more."""
        for line in self._unknown:
            line.close()
        self._unknown = []
        self._server.close()


class Rendezvous(NamedTuple):
    """Where node 0 is to be found: `rendezvous.json`, which is gone when the run has ended."""

    host: str
    ranks_port: int  # of the store through which the ranks find each other
    crew_port: int
    token: str  # of this attempt, so that nobody reports to a stranger who got the same port

    def write(self, folder: Path) -> None:
        store.write_atomically(folder / store.RENDEZVOUS, json.dumps(self._asdict()).encode(), mode=0o600)

    @classmethod
    def wait(cls, folder: Path, timeout_s: float) -> "Rendezvous":
        """Wait until node 0 has said where it is; TimeoutError if it never does."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError):
                return cls(**json.loads((folder / store.RENDEZVOUS).read_text()))
            time.sleep(_RENDEZVOUS_POLL_S)
        raise TimeoutError(f"node 0 did not say within {timeout_s:.0f} s where it is")


class ConnectedAgent:
    """Another node as the lead sees it."""

    def __init__(self, line: Connection, host: str) -> None:
        self.line, self.host = line, host
        self.heard_at = time.monotonic()
        self.ranks: list[RankState] = []
        self.done = False  # it has said that all its ranks have ended, and has nothing more to say
        self.interrupted_by: int | None = None  # the signal that somebody sent it
        self.left = ""  # why it ended its ranks by itself
        self.paused = PauseTotals()

    def receive(self, messages: list[dict[str, Any]]) -> list[tuple[int, bytes]]:
        """Take in its reports; return its ranks' output as (rank, line)."""
        output = []
        for message in messages:
            self.heard_at = time.monotonic()
            self.ranks = [RankState(**state) for state in message["ranks"]]
            self.done = bool(message["done"])
            self.interrupted_by = message["interrupted_by"]
            self.left, self.paused = message["left"], PauseTotals(*message["paused"])
            output += [(int(rank), str(line).encode()) for rank, line in message["output"]]
        return output


class CoordinatorServer:
    """Node 0's side. With a single node there is nobody to lead, and nothing listens."""

    def __init__(self, nodes: int, host: str, silence_s: float) -> None:
        """A node that has not reported for `silence_s` is lost: a link that was cut closes no connection."""
        self.nodes, self.host, self._silence_s = nodes, host, silence_s
        self.agents: dict[int, ConnectedAgent] = {}
        self._began = time.monotonic()
        self._listener = TokenListener(nodes - 1) if nodes > 1 else None

    @property
    def port(self) -> int:
        return self._listener.port if self._listener else 0

    @property
    def token(self) -> str:
        return self._listener.token if self._listener else ""

    def poll(self) -> list[tuple[int, bytes]]:
        """Take what the members have sent; return their ranks' output as (rank, line)."""
        for line, hello in self._listener.accept_known() if self._listener else ():
            self.agents[int(hello["node"])] = ConnectedAgent(line, str(hello["host"]))
        output = []
        for agent in self.agents.values():
            output += agent.receive(agent.line.take())
            agent.line.keep_alive()
        return output

    def lost(self) -> str | None:
        """Return why a node counts as lost, or None."""
        now = time.monotonic()
        for node, agent in self.agents.items():
            if agent.line.closed and not agent.done:
                return f"node {node} ({agent.host}) closed its connection"
            if not agent.done and now - agent.heard_at > self._silence_s:
                return f"node {node} ({agent.host}) has not been heard of for {now - agent.heard_at:.0f} s"
        return self.find_left()

    def find_left(self, quiet_s: float = math.inf) -> str | None:
        """Return which node ended its ranks because it lost this one, or has been silent for `quiet_s`; None if none
        has. The ranks of a node that left make the others fail."""
        now = time.monotonic()
        for node, agent in self.agents.items():
            if agent.left:
                return f"node {node} ({agent.host}) left: {agent.left}"
            if not agent.done and now - agent.heard_at > quiet_s:
                return f"node {node} ({agent.host}) has been silent for {now - agent.heard_at:.0f} s"
        return None

    def forgive_silence(self, paused_s: float) -> None:
        """Let the silence of every node begin now: this supervisor was paused, and heard nothing."""
        self._began += paused_s
        for agent in self.agents.values():
            agent.heard_at = time.monotonic()

    @property
    def paused(self) -> PauseTotals:
        """The longest pause of another node."""
        return functools.reduce(PauseTotals.combine, (agent.paused for agent in self.agents.values()), PauseTotals())

    def find_absent(self, patience_s: float) -> str | None:
        """Return which nodes have not come within `patience_s`, or None."""
        missing = [node for node in range(1, self.nodes) if node not in self.agents]
        if missing and time.monotonic() - self._began > patience_s:
            return f"nodes {missing} did not come within {patience_s:.0f} s"
        return None

    @property
    def interrupted_by(self) -> int | None:
        """The signal that somebody sent to one of the members."""
        return next((agent.interrupted_by for agent in self.agents.values() if agent.interrupted_by), None)

    def request_stop(self, *, stacks: bool) -> None:
        """Have every member end its ranks, after printing their stacks if asked."""
        for agent in self.agents.values():
            agent.line.send({"stop": True, "stacks": stacks})

    def close(self) -> None:
        """Hang up."""
        for agent in self.agents.values():
            agent.line.close()
        if self._listener:
            self._listener.close()


class AgentClient:
    """Another node's side of the connection to the lead."""

    def __init__(self, rendezvous: Rendezvous, node: int, host: str, silence_s: float) -> None:
        """A lead that sent nothing for `silence_s` is gone."""
        self._silence_s, self._left = silence_s, ""
        self._connection = Connection(socket.create_connection((rendezvous.host, rendezvous.crew_port), timeout=30))
        self._connection.send({"token": rendezvous.token, "node": node, "host": host})
        self._reported_at = -_REPORT_S

    def due(self) -> bool:
        """Whether it is time for the next report; send what is left of the last one."""
        self._connection.flush()
        return time.monotonic() - self._reported_at >= _REPORT_S

    def report(
        self,
        ranks: list[RankState],
        output: list[tuple[int, str]],
        *,
        done: bool,
        interrupted_by: int | None,
        paused: PauseTotals,
    ) -> None:
        """Tell the lead how this node's ranks are."""
        self._reported_at = time.monotonic()
        states = [state._asdict() for state in ranks]
        message = {"ranks": states, "output": output, "done": done, "interrupted_by": interrupted_by}
        self._connection.send(message | {"left": self._left, "paused": paused})

    def forgive_silence(self) -> None:
        """Let the silence of the lead begin now: this supervisor was paused, and heard nothing."""
        self._connection.heard_at = time.monotonic()

    def stop_request(self) -> dict[str, Any] | None:
        """Return the lead's order to stop, if one came; a lead that is gone orders it too."""
        stop_request = [message for message in self._connection.take() if message]
        if stop_request:
            return stop_request[-1]
        silent_s = time.monotonic() - self._connection.heard_at
        if not self._connection.closed and silent_s > self._silence_s:
            self._left = f"it has not heard of node 0 for {silent_s:.0f} s"
        gone = self._connection.closed or self._left
        return {"stop": True, "stacks": False} if gone else None

    def close(self) -> None:
        """Hang up, after what was said has gone."""
        until = time.monotonic() + _FLUSH_S
        while self._connection.sending and time.monotonic() < until:
            time.sleep(_FLUSH_S / 100)
            self._connection.flush()
        self._connection.take()  # a connection closed with something unread is reset, and loses what is on its way
        self._connection.close()
