"""Evidence of single runs as text: the record, the end of the log, and the reasons of an outcome."""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pydantic_core

from analysis.results import Results
from bench.core.errors import make_printable
from bench.core.files import open_regular, read_regular
from bench.core.private import mask_tokens
from bench.core.record import RunRecord
from bench.core.store import LOG, Unreadable

TAIL_LINES = 60

_TAIL_BYTES = 32 * 1024
_SERIES = 40  # numbers of a series up to which all are written
_SCALARS = re.compile(r"\[\n\s*[^\[\]{}]*?\n\s*\]")


class Evidence(NamedTuple):
    """Folder, record and log of one run."""

    folder: Path
    record: RunRecord | None  # None: its file is gone
    log: str  # its last lines; empty without a log


def read_evidence(results: Results, row: int) -> Evidence:
    """Return the evidence of a row of the run table."""
    folder = results.get_file(row).parent
    try:
        record: RunRecord | None = results.record(row)
    except (OSError, Unreadable):
        record = None
    return Evidence(folder, record, read_tail(folder / LOG))


def read_tail(log: Path, lines: int = TAIL_LINES) -> str:
    """Return the last lines of a log without control characters; empty without a log."""
    try:
        size, content = _read_end(log)
    except OSError:
        return ""
    text = mask_tokens(content).decode(errors="replace").splitlines()
    whole = text if size <= _TAIL_BYTES else text[1:]
    return "\n".join(map(make_printable, whole[-lines:]))


def _read_end(log: Path) -> tuple[int, bytes]:
    """Return the size of a log and its last bytes."""
    try:
        with open(log, "rb", opener=open_regular) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            return size, file.read()
    except NotADirectoryError:  # it is in an archive
        content = read_regular(log)
        return len(content), content[-_TAIL_BYTES:]


def format_record(record: RunRecord) -> str:
    """Return a record as JSON for readers: each series of numbers on one line, and a long one cut."""
    plain = _shorten_series(record.model_dump(mode="json", by_alias=True))
    text = pydantic_core.to_json(plain, indent=1).decode()  # ten times as fast as json with an indent
    return _SCALARS.sub(lambda found: re.sub("\n *", " ", found[0]), text)


def list_reasons(record: RunRecord) -> list[tuple[str, str]]:
    """Return the evidence of a run's outcome as named texts: texts with their line breaks, other values as JSON."""
    texts: list[tuple[str, str]] = []
    for label, value in record.outcome.evidence.items():
        if isinstance(value, str):
            texts.append((label, value))
        elif isinstance(value, dict) and value and all(isinstance(part, str) for part in value.values()):
            texts += [(f"{label} {part}", text) for part, text in value.items()]
        else:
            texts.append((label, json.dumps(value, indent=1, ensure_ascii=False)))
    return texts


def _shorten_series(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _shorten_series(part) for name, part in value.items()}
    if not isinstance(value, list):
        return value
    if len(value) > _SERIES and not any(isinstance(part, dict | list) for part in value):
        return [*value[:_SERIES], f"… {len(value) - _SERIES:,} more in record.json"]
    return [_shorten_series(part) for part in value]
