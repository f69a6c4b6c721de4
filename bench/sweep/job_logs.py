"""What the log of a job says of its end."""

import os
import re
from pathlib import Path

from bench.errors import make_printable
from bench.files import open_regular
from bench.private import mask_tokens

_END_BYTES = 16_384
_LINE_CHARACTERS = 300
_ONLY_THE_END = re.compile(
    r"exit code \d|: Killed$|: Terminated$|Terminated StepId|CANCELLED|Terminating (job step|StepId)|job step aborted",
    re.IGNORECASE,
)
"""What the scheduler has said already: that something ended, and not why."""


def read_end(path: Path, size_bytes: int = _END_BYTES) -> list[str]:
    """Return the last lines of a text file; OSError for what is none."""
    with open(path, "rb", buffering=0, opener=open_regular) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - size_bytes))
        lines = mask_tokens(file.read()).decode(errors="replace").splitlines()
    return lines[1:] if size > size_bytes else lines  # the first may be torn


def find_last_line(path: Path | None) -> str:
    """Return the last line of a log that tells more than that something ended; empty where there is none."""
    try:
        lines = [line.strip() for line in read_end(path)] if path else []
    except OSError:
        return ""
    written = [line for line in lines if line]
    telling = [line for line in written if not _ONLY_THE_END.search(line)]
    return make_printable((telling or written or [""])[-1])[-_LINE_CHARACTERS:]
