"""`heartbeat.json`: what a run is doing right now, for whoever asks."""

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench import store
from bench.processes import identify_process
from bench.runtime.async_writer import AsyncWriter
from bench.runtime.outcome import RankState


class HeartbeatWriter:
    """Kept fresh every `every_s`. Where the file system stalls it grows old: a beat that cannot be written is skipped,
    the next one knows more."""

    def __init__(self, folder: Path, every_s: float, replace: Callable[[Path, bytes], None] | None = None) -> None:
        """`replace(path, content)` writes the file whole; it may take as long as it likes."""
        self._path, self.every_s, self._replace = folder / store.HEARTBEAT, every_s, replace or _replace_file
        self._writer = AsyncWriter()
        self._at = -every_s

    @property
    def due(self) -> bool:
        return time.monotonic() - self._at >= self.every_s

    def show(self, state: str, ranks: Sequence[RankState]) -> None:
        """Begin to write how the run is."""
        self._at = time.monotonic()
        content = build_heartbeat(state, ranks)
        self._writer.start(lambda: self._replace(self._path, content))

    def end(self, ranks: Sequence[RankState], patience_s: float) -> None:
        """Write the last one, waiting so long for the file system at most."""
        self._writer.wait(patience_s / 2)
        self.show("ended", ranks)
        self._writer.wait(patience_s / 2)


def build_heartbeat(state: str, ranks: Sequence[RankState] = ()) -> bytes:
    """Return what `heartbeat.json` says of an attempt that this process claims or supervises."""
    process = identify_process(os.getpid())
    plain = {
        "state": state,
        "at": format_now(),
        "host": socket.gethostname(),
        "supervisor": os.getpid(),
        "process": process._asdict() if process else None,
        "ranks": [_build_rank_entry(rank) for rank in ranks],
    }
    return json.dumps(plain, indent=1).encode()


def format_now() -> str:
    """Return the time as it stands in the supervisors' files: ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _build_rank_entry(rank: RankState) -> dict[str, Any]:
    silent_s = round(rank.silent_s, 1)
    return {"rank": rank.rank, "pid": rank.pid, "phase": rank.phase, "step": rank.step, "silent_s": silent_s}


def _replace_file(path: Path, content: bytes) -> None:
    """A reader sees a whole file, the old or the new one. Nothing is forced to the disk: a heartbeat need not outlive
    the machine."""
    new = path.with_name(f".{path.name}.new")
    try:
        new.write_bytes(content)
        new.replace(path)
    except OSError:  # the disk is full, say
        new.unlink(missing_ok=True)
        raise
