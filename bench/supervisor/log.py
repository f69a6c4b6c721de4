"""All ranks' output in one file."""

import contextlib
from pathlib import Path
from typing import BinaryIO

_LOG_LIMIT_BYTES = 16 * 2**20


class Log:
    """All ranks' output in one file, each line behind its rank. A disk that is full loses lines, never the run."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._left = _LOG_LIMIT_BYTES

    def write(self, rank: int, line: bytes) -> None:
        if self._left <= 0:
            return
        self._left -= len(line)
        text = line if self._left > 0 else b"(the log is cut here: it reached its limit)"
        with contextlib.suppress(OSError):
            self._file.write(b"[%d] %s\n" % (rank, text))
