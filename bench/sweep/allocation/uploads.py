"""Upload the progress of an allocation to an object store, in a thread, while points (configurations) run."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from bench.core import store
from bench.core.errors import UserError
from bench.core.study_store import StudyStore

_EVERY_S = 20.0
_FIRST_S = 3.0  # after the beginning of an attempt
_POLL_S = 1.0
_LOG_LIMIT_BYTES = 2**24  # a longer log is uploaded only once, at the end of its attempt
_END_S = 5.0  # for the thread to end its last upload


class JobUploads:
    """Thread that uploads the log of this process, and the heartbeat and log of the current attempt.

    Between `__enter__` and `__exit__`, standard output and standard error of this process and of its children go to the
    log file. New lines of the log are copied to the original standard output. Errors of the store are ignored, since a
    later upload contains the same lines.
    """

    def __init__(self, study: StudyStore, log: Path) -> None:
        self._study, self._log = study.without_patience(), log
        self._attempt: Path | None = None
        self._sent: dict[Path, tuple[int, int]] = {}  # size and time of the last uploaded version
        self._is_over, self._copying = threading.Event(), threading.Lock()
        self._thread = threading.Thread(target=self._upload_repeatedly, daemon=True)
        self._copied_bytes = log.stat().st_size if log.exists() else 0
        self._streams: list[int] = []  # duplicates of the original standard output and standard error
        self._next_at = 0.0

    def __enter__(self) -> "JobUploads":
        sys.stdout.flush()
        sys.stderr.flush()
        self._streams = [os.dup(1), os.dup(2)]
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._is_over.set()
        self._thread.join(_END_S)
        self._copy_log()
        streams, self._streams = self._streams, []
        for number, stream in enumerate(streams, start=1):
            os.dup2(stream, number)
        self._upload(self._log)

    @contextlib.contextmanager
    def of_attempt(self, folder: Path) -> Iterator[None]:
        """Upload the heartbeat and the log of an attempt repeatedly until the context ends."""
        self._attempt, self._next_at = folder, time.monotonic() + _FIRST_S
        try:
            yield
        finally:
            self._attempt = None

    def _upload_repeatedly(self) -> None:
        while not self._is_over.wait(_POLL_S):
            self._copy_log()
            attempt = self._attempt
            if attempt:  # at once: the scheduler may soon end this process
                self._upload(attempt / store.INTERRUPTED)
            if time.monotonic() >= self._next_at:
                self._next_at = time.monotonic() + _EVERY_S
                for path in (self._log, *((attempt / store.HEARTBEAT, attempt / store.LOG) if attempt else ())):
                    self._upload(path)

    def _upload(self, path: Path) -> None:
        """Upload a file if it exists, has changed since its last upload, and is not too long."""
        with contextlib.suppress(OSError, UserError):
            found = path.stat()
            version = found.st_size, found.st_mtime_ns
            if self._sent.get(path) != version and found.st_size <= _LOG_LIMIT_BYTES:
                self._study.push(path)
                self._sent[path] = version

    def _copy_log(self) -> None:
        """Copy new lines of the log to the original standard output."""
        # The thread may still copy when the process ends, if the reader of the output is slow.
        if not self._copying.acquire(timeout=_END_S):
            return
        try:
            with contextlib.suppress(OSError), self._log.open("rb") as file:
                file.seek(self._copied_bytes)
                while self._streams and (chunk := file.read(1 << 16)):
                    self._copied_bytes += os.write(self._streams[0], chunk)
                    file.seek(self._copied_bytes)
        finally:
            self._copying.release()
