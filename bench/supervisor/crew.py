"""How the supervisors of one run keep in touch: node 0's leads, the others report to it over TCP.

What a rank says of its failure reaches only its own node's supervisor; the others see a lost peer at best. So every
node reports its ranks to the lead, which alone decides how the run ends. The lead listens on a port that the system
gave it and writes it into the run's folder: nothing has to be agreed on beforehand, and no port can collide.
"""

import contextlib
import json
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple

from bench import store
from bench.supervisor.line import Entrance, Line
from bench.supervisor.verdict import RankState

SILENCE_S = 10.0
"""A node that has not reported for so long is lost: a link that was cut closes no connection."""
_RENDEZVOUS_POLL_S = 0.2
_REPORT_S = 1.0
_LAST_WORDS_S = 5.0


class MeetingPoint(NamedTuple):
    """Where node 0 is to be found: `rendezvous.json`, which is gone when the run has ended."""

    host: str
    ranks_port: int  # of the store through which the ranks find each other
    crew_port: int
    token: str  # of this attempt, so that nobody reports to a stranger who got the same port

    def write(self, folder: Path) -> None:
        store.write_atomically(folder / store.RENDEZVOUS, json.dumps(self._asdict()).encode(), mode=0o600)

    @classmethod
    def wait(cls, folder: Path, timeout_s: float) -> "MeetingPoint":
        """Wait until node 0 has said where it is; TimeoutError if it never does."""
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            with contextlib.suppress(FileNotFoundError):
                return cls(**json.loads((folder / store.RENDEZVOUS).read_text()))
            time.sleep(_RENDEZVOUS_POLL_S)
        raise TimeoutError(f"node 0 did not say within {timeout_s:.0f} s where it is")


class Member:
    """Another node as the lead sees it."""

    def __init__(self, line: Line, host: str) -> None:
        self.line, self.host = line, host
        self.heard_at = time.monotonic()
        self.ranks: list[RankState] = []
        self.done = False  # it has said that all its ranks have ended, and has nothing more to say
        self.interrupted_by: int | None = None  # the signal that somebody sent it

    def hear(self, messages: list[dict[str, Any]]) -> list[tuple[int, bytes]]:
        """Take in its reports; return its ranks' output as (rank, line)."""
        output = []
        for message in messages:
            self.heard_at = time.monotonic()
            self.ranks = [RankState(**state) for state in message["ranks"]]
            self.done = bool(message["done"])
            self.interrupted_by = message["interrupted_by"]
            output += [(int(rank), str(line).encode()) for rank, line in message["output"]]
        return output


class Lead:
    """Node 0's side. With a single node there is nobody to lead, and nothing listens."""

    def __init__(self, nodes: int, host: str) -> None:
        self.nodes, self.host = nodes, host
        self.members: dict[int, Member] = {}
        self._began = time.monotonic()
        self._entrance = Entrance(nodes - 1) if nodes > 1 else None

    @property
    def port(self) -> int:
        return self._entrance.port if self._entrance else 0

    @property
    def token(self) -> str:
        return self._entrance.token if self._entrance else ""

    def poll(self) -> list[tuple[int, bytes]]:
        """Take what the members have sent; return their ranks' output as (rank, line)."""
        for line, hello in self._entrance.arrivals() if self._entrance else ():
            self.members[int(hello["node"])] = Member(line, str(hello["host"]))
        output = []
        for member in self.members.values():
            output += member.hear(member.line.take())
            member.line.keep_alive()
        return output

    def lost(self) -> str | None:
        """Return why a node counts as lost, or None."""
        now = time.monotonic()
        for node, member in self.members.items():
            if member.line.closed and not member.done:
                return f"node {node} ({member.host}) closed its connection"
            if not member.done and now - member.heard_at > SILENCE_S:
                return f"node {node} ({member.host}) has not been heard of for {now - member.heard_at:.0f} s"
        return None

    def absent(self, patience_s: float) -> str | None:
        """Return which nodes have not come within `patience_s`, or None."""
        missing = [node for node in range(1, self.nodes) if node not in self.members]
        if missing and time.monotonic() - self._began > patience_s:
            return f"nodes {missing} did not come within {patience_s:.0f} s"
        return None

    @property
    def interrupted_by(self) -> int | None:
        """The signal that somebody sent to one of the members."""
        return next((member.interrupted_by for member in self.members.values() if member.interrupted_by), None)

    def order(self, *, stacks: bool) -> None:
        """Have every member end its ranks, after printing their stacks if asked."""
        for member in self.members.values():
            member.line.send({"stop": True, "stacks": stacks})

    def close(self) -> None:
        """Hang up."""
        for member in self.members.values():
            member.line.close()
        if self._entrance:
            self._entrance.close()


class Follower:
    """Another node's side of the connection to the lead."""

    def __init__(self, point: MeetingPoint, node: int, host: str) -> None:
        self._line = Line(socket.create_connection((point.host, point.crew_port), timeout=30))
        self._line.send({"token": point.token, "node": node, "host": host})
        self._reported_at = -_REPORT_S

    def due(self) -> bool:
        """Whether it is time for the next report; send what is left of the last one."""
        self._line.flush()
        return time.monotonic() - self._reported_at >= _REPORT_S

    def report(
        self, ranks: list[RankState], output: list[tuple[int, str]], *, done: bool, interrupted_by: int | None
    ) -> None:
        """Tell the lead how this node's ranks are."""
        self._reported_at = time.monotonic()
        told = [state._asdict() for state in ranks]
        self._line.send({"ranks": told, "output": output, "done": done, "interrupted_by": interrupted_by})

    def orders(self) -> dict[str, Any] | None:
        """Return the lead's order to stop, if one came; a lead that is gone orders it too."""
        orders = [message for message in self._line.take() if message]
        if orders:
            return orders[-1]
        gone = self._line.closed or time.monotonic() - self._line.heard_at > SILENCE_S
        return {"stop": True, "stacks": False} if gone else None

    def close(self) -> None:
        """Hang up, after what was said has gone."""
        until = time.monotonic() + _LAST_WORDS_S
        while self._line.sending and time.monotonic() < until:
            time.sleep(_LAST_WORDS_S / 100)
            self._line.flush()
        self._line.take()  # a connection closed with something unread is reset, and loses what is still on its way
        self._line.close()
