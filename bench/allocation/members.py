"""How the conductor tells the other nodes which point to run, and hears that they are ready for the next."""

import contextlib
import json
import secrets
import socket
import time
from pathlib import Path
from typing import Any

from bench import store
from bench.supervisor.crew import Line, MeetingPoint

MEETING = "meeting.json"
_POLL_S = 0.1
_READY_S = 30.0  # after a point, for a node's ranks to be gone


class Members:
    """The conductor's side: one line to every other supervisor of the allocation."""

    def __init__(self, count: int, host: str, folder: Path, patience_s: float) -> None:
        self._lines: dict[int, Line] = {}
        self.hosts: dict[int, str] = {}
        if count:
            self._gather(count, host, folder, patience_s)

    def _gather(self, count: int, host: str, folder: Path, patience_s: float) -> None:
        token, meeting = secrets.token_hex(8), folder / MEETING
        with socket.create_server(("", 0), backlog=count) as server:
            server.setblocking(False)
            point = {"host": host, "port": server.getsockname()[1], "token": token}
            store.write_atomically(meeting, json.dumps(point).encode(), mode=0o600)
            until, strangers = time.monotonic() + patience_s, []
            while len(self._lines) < count:
                with contextlib.suppress(BlockingIOError):
                    strangers.append(Line(server.accept()[0]))
                for line in list(strangers):
                    for hello in line.take():
                        strangers.remove(line)
                        if hello.get("token") == token:
                            self._lines[int(hello["number"])], self.hosts[int(hello["number"])] = line, hello["host"]
                        break
                if time.monotonic() > until:
                    missing = sorted(set(range(1, count + 1)) - set(self._lines))
                    raise TimeoutError(f"supervisors {missing} did not come within {patience_s:.0f} s")
                time.sleep(_POLL_S)
        meeting.unlink(missing_ok=True)

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


def meet(folder: Path, number: int, host: str, patience_s: float) -> Line:
    """Join the conductor of the job in `folder`; TimeoutError if there is none."""
    until = time.monotonic() + patience_s
    while True:
        try:
            point: dict[str, Any] = json.loads((folder / MEETING).read_bytes())
            line = Line(socket.create_connection((point["host"], point["port"]), timeout=10))
        except (OSError, ValueError) as error:  # not there yet, or left over from before a restart
            if time.monotonic() > until:
                raise TimeoutError(f"the first node could not be reached within {patience_s:.0f} s") from error
            time.sleep(_POLL_S)
        else:
            line.send({"token": point["token"], "number": number, "host": host})
            return line
