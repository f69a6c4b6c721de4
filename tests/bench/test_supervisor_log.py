"""Tests that ranks and supervisors do not wait for a stalled file system."""

import json
import os
import resource
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from bench.core import store
from bench.runtime.outcome import HeartbeatWriter, RankState
from bench.runtime.process import RankLog, RankProcess, start_process

pytestmark = pytest.mark.processes

AT_ONCE_S = 0.5
PATIENCE_S = 120.0


class Stalled:
    """Simulated file system on which every write blocks until `released` is set. Code that waits for the write
    hangs."""

    def __init__(self) -> None:
        self.released = threading.Event()

    def opened(self, path: Path) -> BinaryIO:
        self.released.wait()
        return path.open("ab", buffering=0)

    def replace(self, path: Path, content: bytes) -> None:
        self.released.wait()
        path.write_bytes(content)


def beat(step: int) -> list[RankState]:
    return [RankState(0, None, False, None, "steps", step)]


def test_every_log_line_begins_with_its_rank(tmp_path: Path) -> None:
    log = RankLog(tmp_path / "run.log")
    for line in range(3):
        log.write(line % 2, b"line %d" % line)
    log.close(PATIENCE_S)
    assert (tmp_path / "run.log").read_text() == "[0] line 0\n[1] line 1\n[0] line 2\n"


def test_rank_ends_even_if_its_output_is_not_read(tmp_path: Path) -> None:
    """A pipe holds 64 KiB of a rank's output. If the supervisor stopped reading while it waits for the log file, a rank
    that prints more would wait forever."""
    os.mkfifo(tmp_path / "run.log")  # opening a pipe without a reader blocks forever
    log = RankLog(tmp_path / "run.log")
    command = [sys.executable, "-c", "for _ in range(20_000): print('x' * 100)"]
    rank = RankProcess(0, command, dict(os.environ), {}, start_process)
    until = time.monotonic() + PATIENCE_S
    while rank.exit_code is None and time.monotonic() < until:
        time.sleep(0.05)
        rank.drain(log.write)
    assert rank.exit_code == 0
    log.close(AT_ONCE_S)  # the pipe never gets a reader
    rank.close()


def test_lost_lines_are_counted_at_their_place_in_the_log(tmp_path: Path) -> None:
    stalled, path = Stalled(), tmp_path / "run.log"
    log = RankLog(path, stalled.opened)
    for line in range(5000):
        log.write(0, b"%d" % line)
    stalled.released.set()
    log.close(PATIENCE_S)
    *lines, last = path.read_text().splitlines()
    assert lines == [f"[0] {line}" for line in range(len(lines))]
    assert last == f"({5000 - len(lines)} lines are lost here: the file system did not take them)"
    assert 1000 < len(lines) < 5000


def test_failed_heartbeat_is_skipped(tmp_path: Path) -> None:
    stalled = Stalled()
    heartbeat = HeartbeatWriter(tmp_path, 2.0, stalled.replace)
    heartbeat.show("running", beat(1))
    heartbeat.show("running", beat(2))
    heartbeat.end(beat(3), AT_ONCE_S)
    stalled.released.set()
    heartbeat.end(beat(4), PATIENCE_S)
    shown = json.loads((tmp_path / store.HEARTBEAT).read_text())
    assert (shown["state"], shown["ranks"][0]["step"]) == ("ended", 4)


def test_heartbeat_is_never_read_half_written(tmp_path: Path) -> None:
    """A separate thread writes each heartbeat to the file at an unknown time. The test reads the file until it has seen
    five different heartbeats, all of them complete."""
    heartbeat, seen, until = HeartbeatWriter(tmp_path, 0.0), set(), time.monotonic() + PATIENCE_S
    while len(seen) < 5 and time.monotonic() < until:
        heartbeat.show("running", beat(len(seen)))
        if (tmp_path / store.HEARTBEAT).exists():
            seen.add(json.loads((tmp_path / store.HEARTBEAT).read_text())["ranks"][0]["step"])
    heartbeat.end(beat(5), PATIENCE_S)
    assert seen == {0, 1, 2, 3, 4}
    assert [path.name for path in tmp_path.iterdir()] == [store.HEARTBEAT], "nothing half-written is left"


def test_heartbeat_on_a_full_disk_leaves_no_partial_file(tmp_path: Path) -> None:
    """On a full disk, a file can be created, but nothing can be written to it. The empty file must be removed."""
    heartbeat, (soft, hard) = HeartbeatWriter(tmp_path, 0.0), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        heartbeat.end(beat(1), PATIENCE_S)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []
