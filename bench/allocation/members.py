"""How the conductor tells the other nodes which point to run, and hears that they are ready for the next.

They meet at a port that the conductor names in the job's folder. All tasks of an array share that folder, and a job
that was put back into the queue finds it as it was, so the file has the name of its allocation, and whoever comes has
to be of the same one.
"""

import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

from bench import store
from bench.supervisor.crew import MeetingPoint
from bench.supervisor.line import Entrance, Line

_POLL_S = 0.1
_READY_S = 30.0  # after a point, for a node's ranks to be gone


def meeting_file(folder: Path, allocation: str) -> Path:
    """Return the file in a job's folder that says where the supervisors of one of its allocations meet."""
    return folder / f"meeting-{allocation}.json"


class Members:
    """The conductor's side: one line to every other supervisor of the allocation."""

    def __init__(self, count: int, host: str, folder: Path, allocation: str, patience_s: float) -> None:
        """`host` is where this supervisor is found; `allocation` names what no other start of any job has."""
        self._lines: dict[int, Line] = {}
        self.hosts: dict[int, str] = {}
        self._count, self._allocation = count, allocation
        if count:
            self._gather(host, meeting_file(folder, allocation), patience_s)

    def _gather(self, host: str, meeting: Path, patience_s: float) -> None:
        entrance, until = Entrance(self._count), time.monotonic() + patience_s
        try:
            point = {"host": host, "port": entrance.port, "token": entrance.token}
            store.write_atomically(meeting, json.dumps(point).encode(), mode=0o600)
            while len(self._lines) < self._count:
                for line, hello in entrance.arrivals():
                    self._admit(line, hello)
                if time.monotonic() > until:
                    missing = sorted(set(range(1, self._count + 1)) - set(self._lines))
                    raise TimeoutError(f"supervisors {missing} did not come within {patience_s:.0f} s")
                time.sleep(_POLL_S)
        finally:
            entrance.close()
            meeting.unlink(missing_ok=True)

    def _admit(self, line: Line, hello: dict[str, Any]) -> None:
        """Take one who knows the token in, unless it is of another allocation: what it would measure is not ours."""
        number, host = int(hello["number"]), str(hello["host"])
        if hello.get("allocation") == self._allocation:
            self._lines[number], self.hosts[number] = line, host
        else:
            line.close()
            refused = f"{host} was turned away: it is of allocation {hello.get('allocation')}, and this is"
            print(refused, self._allocation, file=sys.stderr, flush=True)

    def run(self, folder: Path, point: MeetingPoint) -> None:
        """Have every member run the attempt in `folder`."""
        for line in self._lines.values():
            line.send({"run": str(folder), "point": point._asdict()})

    def wait(self) -> list[str]:
        """Wait until every member is ready for the next point; return the hosts that do not answer any more."""
        until, busy = time.monotonic() + _READY_S, set(self._lines)
        while busy and time.monotonic() < until:
            for number in list(busy):
                ready = any("ready" in message for message in self._lines[number].take())
                if ready or self._lines[number].closed:
                    busy.discard(number)
            time.sleep(_POLL_S)
        return [self.hosts[number] for number, line in self._lines.items() if line.closed or number in busy]

    def dismiss(self) -> None:
        """Send everybody home."""
        for line in self._lines.values():
            line.send({"end": True})


def meet(folder: Path, allocation: str, number: int, host: str, patience_s: float) -> Line:
    """Join the conductor of an allocation of the job in `folder`; TimeoutError if there is none."""
    until, meeting = time.monotonic() + patience_s, meeting_file(folder, allocation)
    while True:
        try:
            point: dict[str, Any] = json.loads(meeting.read_bytes())
            line = Line(socket.create_connection((point["host"], point["port"]), timeout=10))
        except (OSError, ValueError) as error:  # not there yet
            if time.monotonic() > until:
                raise TimeoutError(f"the first node could not be reached within {patience_s:.0f} s") from error
            time.sleep(_POLL_S)
        else:
            line.send({"token": point["token"], "allocation": allocation, "number": number, "host": host})
            return line
