"""Files into rows, on all cores: the part of reading that takes time.

The others work in processes of their own that read names from standard input and write Arrow to standard output. They
are not `multiprocessing`'s, which would run a user's script again in each of them.
"""

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from analysis.columns import Column, list_all_columns
from analysis.observed import get_window
from analysis.reading.rows import FILE, RecordFile, build_row, build_schema
from analysis.stats import windows
from bench.record import RunRecord
from bench.store import Unreadable, read_record

_BATCH = 500  # records; so many are in memory as Python objects
_SHARE = 500  # records that are worth starting a process for
_SKIPPED = b"skipped"


class ExtractedRows(NamedTuple):
    """What files held."""

    table: pa.Table  # of `analysis.reading.rows.build_schema`
    skipped: dict[str, str]  # by path, why it is no record


def extract(root: Path, files: Sequence[RecordFile]) -> ExtractedRows:
    """Read files, whose paths are below `root`, into rows, in no order."""
    processes = min(_count_cores(), len(files) // _SHARE)
    if processes < 2:
        return _extract_in_process(root, files)
    with ThreadPoolExecutor(processes) as pool:
        parts = list(
            pool.map(lambda share: _extract_in_subprocess(root, share), (files[i::processes] for i in range(processes)))
        )
    skipped = {path: why for part in parts for path, why in part.skipped.items()}
    return ExtractedRows(pa.concat_tables([part.table for part in parts]), skipped)


def _extract_in_process(root: Path, files: Sequence[RecordFile]) -> ExtractedRows:
    skipped: dict[str, str] = {}
    return ExtractedRows(pa.Table.from_batches(_build_batches(root, files, skipped), build_schema()), skipped)


def _extract_in_subprocess(root: Path, files: Sequence[RecordFile]) -> ExtractedRows:
    """Read files in another process; here, should that one not come to its end."""
    command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()"]
    around = os.environ | {"PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
    request = json.dumps([str(root.absolute()), files]).encode()
    done = subprocess.run(command, input=request, capture_output=True, env=around, check=False)
    if done.returncode == -signal.SIGINT:
        raise KeyboardInterrupt
    if done.returncode:
        return _extract_in_process(root, files)
    result = pa.ipc.open_stream(done.stdout).read_all()
    return ExtractedRows(result.replace_schema_metadata(), json.loads(result.schema.metadata[_SKIPPED]))


def _build_batches(root: Path, files: Sequence[RecordFile], skipped: dict[str, str]) -> Iterator[pa.RecordBatch]:
    """Yield rows; what is no record is added to `skipped` meanwhile."""
    known, left = list_all_columns(), iter(files)
    while share := list(islice(left, _BATCH)):
        records = [(file, found) for file in share if (found := _read_record(root, file, skipped))]
        windows.prepare(timed.step_s for _, record in records if (timed := get_window(record)))
        yield from _build_fitting_batches(
            [result for one in records if (result := _try_build_row(*one, known, skipped))], skipped
        )


def _read_record(root: Path, file: RecordFile, skipped: dict[str, str]) -> RunRecord | None:
    try:
        return read_record(root / file.path)
    except Unreadable as error:
        skipped[file.path] = error.why
    except FileNotFoundError:
        skipped[file.path] = "vanished while it was read"
    return None


def _try_build_row(
    file: RecordFile, record: RunRecord, known: Mapping[str, Column], skipped: dict[str, str]
) -> dict[str, Any] | None:
    try:
        return build_row(file, record, known)
    except (ArithmeticError, ValueError) as error:
        skipped[file.path] = f"cannot be analysed: {error}"
    return None


def _build_fitting_batches(rows: list[dict[str, Any]], skipped: dict[str, str]) -> Iterator[pa.RecordBatch]:
    """Yield rows, without those that hold a number too large for its column."""
    try:
        yield pa.RecordBatch.from_pylist(rows, build_schema())
    except (ValueError, OverflowError) as error:  # Arrow's own are ValueErrors
        if len(rows) == 1:
            skipped[rows[0][FILE]] = f"cannot be analysed: {error}"
            return
        yield from _build_fitting_batches(rows[: len(rows) // 2], skipped)
        yield from _build_fitting_batches(rows[len(rows) // 2 :], skipped)


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    """Read what standard input asks for, and write it to standard output."""
    gc.disable()  # records are freed without it, and it looks at all of them again and again
    root, files = json.load(sys.stdin)
    found = _extract_in_process(Path(root), [RecordFile(*file) for file in files])
    result = found.table.replace_schema_metadata({_SKIPPED: json.dumps(found.skipped)})
    with pa.ipc.new_stream(sys.stdout.buffer, result.schema) as stream:
        stream.write_table(result)
