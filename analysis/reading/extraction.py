"""Files into rows, on all cores: the part of reading that takes time.

The others work in processes of their own that read names from standard input and write Arrow to standard output. They
are not `multiprocessing`'s, which would run a user's script again in each of them.
"""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from analysis.columns import Column, list_all_columns
from analysis.observed import get_window
from analysis.reading.rows import FILE, RecordFile, build_row, build_schema
from analysis.stats import intervals
from bench.core.record import RunRecord
from bench.core.store import Unreadable, read_record

_BATCH = 500  # records; so many are in memory as Python objects
_SHARE = 500  # records that are worth starting a process for
_FILES, _SKIPPED = b"files", b"skipped"
_UNFIT = (ValueError, OverflowError)  # Arrow's own are ValueErrors


Follow = Callable[[int, int], None]
"""What hears how many files are read, of how many; from any thread."""


class ExtractedRows(NamedTuple):
    """What files held."""

    table: pa.Table  # of `analysis.reading.rows.build_schema`
    skipped: dict[str, str]  # by path, why it is no record


class _Batch(NamedTuple):
    """What so many files held."""

    files: int
    rows: pa.RecordBatch
    skipped: dict[str, str]


def extract(root: Path, files: Sequence[RecordFile], follow: Follow = lambda read, files: None) -> ExtractedRows:
    """Read files, whose paths are below `root`, into rows, in no order."""
    processes = max(1, min(_count_cores(), len(files) // _SHARE))
    extract_batches = _extract_in_subprocess if processes > 1 else _extract_here
    read = [0] * processes

    def extract_share(place: int) -> list[_Batch]:
        begins = range(place * _BATCH, len(files), processes * _BATCH)  # repeats, which are neighbours, stay together
        batches: list[_Batch] = []
        for batch in extract_batches(root, [file for begin in begins for file in files[begin : begin + _BATCH]]):
            batches.append(batch)
            read[place] += batch.files
            follow(sum(read), len(files))
        return batches

    if processes == 1:
        batches = extract_share(0)
    else:
        with ThreadPoolExecutor(processes) as pool:
            batches = [batch for share in pool.map(extract_share, range(processes)) for batch in share]
    skipped = {path: why for batch in batches for path, why in batch.skipped.items()}
    return ExtractedRows(pa.Table.from_batches([batch.rows for batch in batches], build_schema()), skipped)


def _extract_in_subprocess(root: Path, files: Sequence[RecordFile]) -> Iterator[_Batch]:
    """Read files in another process; from here on what that one does not come to."""
    command = [sys.executable, "-P", "-c", f"from {__name__} import main; main()"]
    around = os.environ | {"PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=around)
    done = 0
    with contextlib.suppress(OSError, pa.ArrowException), process:
        assert process.stdin and process.stdout
        with process.stdin:
            process.stdin.write(json.dumps([str(root.absolute()), files]).encode())
        for rows, about in pa.ipc.open_stream(process.stdout).iter_batches_with_custom_metadata():
            batch = _Batch(int(about[_FILES]), rows, json.loads(about[_SKIPPED]))
            yield batch
            done += batch.files
    if process.returncode == -signal.SIGINT:
        raise KeyboardInterrupt
    yield from _extract_here(root, files[done:])


def _extract_here(root: Path, files: Sequence[RecordFile]) -> Iterator[_Batch]:
    known = list_all_columns()
    for begin in range(0, len(files), _BATCH):
        some, skipped = files[begin : begin + _BATCH], dict[str, str]()
        records = [(file, found) for file in some if (found := _read_record(root, file, skipped))]
        intervals.prepare_windows(timed.step_s for _, record in records if (timed := get_window(record)))
        rows = [result for one in records if (result := _try_build_row(*one, known, skipped))]
        yield _Batch(len(some), _build_fitting_rows(rows, skipped), skipped)


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


def _build_fitting_rows(rows: list[dict[str, Any]], skipped: dict[str, str]) -> pa.RecordBatch:
    """Return rows, without those that hold a number too large for its column."""
    try:
        return pa.RecordBatch.from_pylist(rows, build_schema())
    except _UNFIT:
        return pa.RecordBatch.from_pylist([row for row in rows if _fits(row, skipped)], build_schema())


def _fits(row: dict[str, Any], skipped: dict[str, str]) -> bool:
    try:
        pa.RecordBatch.from_pylist([row], build_schema())
    except _UNFIT as error:
        skipped[row[FILE]] = f"cannot be analysed: {error}"
        return False
    return True


def _count_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    """Read what standard input asks for, and write it to standard output."""
    gc.disable()  # records are freed without it, and it looks at all of them again and again
    root, files = json.load(sys.stdin)
    with pa.ipc.new_stream(sys.stdout.buffer, build_schema()) as stream:
        for batch in _extract_here(Path(root), [RecordFile(*file) for file in files]):
            stream.write_batch(batch.rows, {_FILES: str(batch.files), _SKIPPED: json.dumps(batch.skipped)})
