"""Connections between the supervisors of a job: JSON objects, one per line, and the port at which they begin.

The port is open to the whole network, so whoever connects is a stranger until it has named the token, which stands in a
file that only the job's own user can read. A stranger costs a descriptor and a kilobyte for a few seconds, and nothing
that it sends can end the run.
"""

import json
import secrets
import socket
import time
from typing import Any

_QUIET_S = 1.0
_HELLO_BYTES = 1024
_HELLO_S = 5.0  # those who know the token say it as soon as they are connected
_MAX_UNKNOWN = 16  # at a time, besides as many as are awaited


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
