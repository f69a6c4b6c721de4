"""All ranks' output in one file."""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from bench.private import mask_tokens

_LOG_LIMIT_BYTES = 16 * 2**20
_WAITING_LINES = 4096


class RankLog:
    """All ranks' output in one file, each line behind its rank, written by a thread of its own. A disk that is full
    loses lines, and so does one that stalls for too long; neither delays a rank."""

    def __init__(self, path: Path, open_file: Callable[[Path], BinaryIO] = lambda path: path.open("ab", buffering=0)):
        """`opened(path)` returns the file, open for appending; it may take as long as it likes."""
        self._waiting: list[bytes] = []
        self._left, self._lost = _LOG_LIMIT_BYTES, 0
        self._closing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._keep_writing, args=(path, open_file), daemon=True)
        self._thread.start()

    def write(self, rank: int, line: bytes) -> None:
        """Take a line, without waiting for the file."""
        with self._changed:
            if self._left <= 0:
                return
            if len(self._waiting) >= _WAITING_LINES:
                self._lost += 1
                return
            self._note_lost_lines()
            self._left -= len(line)
            text = line if self._left > 0 else b"(the log is cut here: it reached its limit)"
            self._waiting.append(b"[%d] %s\n" % (rank, mask_tokens(text)))
            self._changed.notify()

    def close(self, patience_s: float) -> None:
        """Take no more, and give the file system so long at most for what was taken."""
        with self._changed:
            self._note_lost_lines()
            self._left, self._closing = 0, True
            self._changed.notify()
        self._thread.join(patience_s)

    def _note_lost_lines(self) -> None:
        if self._lost:
            self._waiting.append(b"(%d lines are lost here: the file system did not take them)\n" % self._lost)
            self._lost = 0

    def _keep_writing(self, path: Path, open_file: Callable[[Path], BinaryIO]) -> None:
        with contextlib.suppress(OSError), open_file(path) as file:
            while lines := self._take():
                with contextlib.suppress(OSError):
                    file.write(b"".join(lines))

    def _take(self) -> list[bytes]:
        """Wait for lines and return them; none after the last."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closing)
            lines, self._waiting = self._waiting, []
            return lines
