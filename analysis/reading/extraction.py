"""Extraction of table rows from record files, in parallel on all cores. This is the slow part of reading results.

Worker processes read file names from standard input and write Arrow data to standard output. `multiprocessing` is not
used, because it would run the user's script again in each process.
"""

import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from analysis.columns import list_all_columns
from analysis.observed import get_window
from analysis.reading.rows import FILE, RecordFile, build_row, build_schema
from analysis.stats.intervals import prepare_windows
from bench.core.installed_plugins import warn_skipped, warned
from bench.core.record import RunRecord
from bench.core.store import Unreadable, read_record

_BATCH = 500  # maximum number of records in memory as Python objects
_SHARE = 500  # minimum number of records per process; reading fewer is faster than starting a process
_FILES, _SKIPPED, _WARNED = b"files", b"skipped", b"warned"
_UNFIT = (ValueError, OverflowError)  # raised by Arrow for values that a column cannot hold


Follow = Callable[[int, int], None]
"""Progress callback. Its arguments are the number of files read so far and the total; it can be called from any thread.
"""


class _Batch(NamedTuple):
    """Rows of up to _BATCH record files, the number of files, and the skipped files with the reason. `warned` holds the
    warnings about skipped plug-ins that the process reading these files has logged so far."""

    files: int
    rows: pa.RecordBatch
    skipped: dict[str, str]
    warned: dict[str, str]


def extract(
    root: Path, files: Sequence[RecordFile], follow: Follow = lambda read, files: None
) -> tuple[pa.Table, dict[str, str]]:
    """Return the rows of record files, unsorted, with the columns of `analysis.reading.rows.build_schema`. Also return
    the reason for each file that could not be read, by path.

    The paths of `files` are relative to `root`. `follow` is the progress callback; it gets the number of files read so
    far and the total.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    processes = max(1, min(cores, len(files) // _SHARE))
    extract_batches = _extract_in_subprocess if processes > 1 else _extract_here
    read = [0] * processes

    def extract_share(place: int) -> list[_Batch]:
        # batches of adjacent files, because repeats of a configuration in one batch share work
        begins = range(place * _BATCH, len(files), processes * _BATCH)
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
    return pa.Table.from_batches([batch.rows for batch in batches], build_schema()), skipped


def _extract_in_subprocess(root: Path, files: Sequence[RecordFile]) -> Iterator[_Batch]:
    """Yield the rows of files from a worker process. If the worker fails, this process reads the remaining files."""
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
            batch = _Batch(int(about[_FILES]), rows, json.loads(about[_SKIPPED]), json.loads(about[_WARNED]))
            for plugin, why in batch.warned.items():
                warn_skipped(plugin, why)
            yield batch
            done += batch.files
    if process.returncode == -signal.SIGINT:
        raise KeyboardInterrupt
    yield from _extract_here(root, files[done:])


def _extract_here(root: Path, files: Sequence[RecordFile]) -> Iterator[_Batch]:
    known = list_all_columns()
    for begin in range(0, len(files), _BATCH):
        some, skipped = files[begin : begin + _BATCH], dict[str, str]()
        records: list[tuple[RecordFile, RunRecord]] = []
        for file in some:
            with _skipping(file.path, skipped):
                records.append((file, read_record(root / file.path)))
        prepare_windows(timed.step_s for _, record in records if (timed := get_window(record)))
        rows: list[dict[str, Any]] = []
        for file, record in records:
            with _skipping(file.path, skipped):
                rows.append(build_row(file, record, known))
        yield _Batch(len(some), _build_fitting_rows(rows, skipped), skipped, warned)


@contextlib.contextmanager
def _skipping(path: str, skipped: dict[str, str]) -> Iterator[None]:
    """Context manager that adds a file to `skipped`, with the reason, if the file cannot be read or analysed."""
    try:
        yield
    except Unreadable as error:
        skipped[path] = error.why
    except FileNotFoundError:
        skipped[path] = "deleted while it was read"
    except (ArithmeticError, ValueError) as error:
        skipped[path] = f"cannot be analysed: {error}"


def _build_fitting_rows(rows: list[dict[str, Any]], skipped: dict[str, str]) -> pa.RecordBatch:
    """Return a batch of the rows whose values fit their columns. The files of all other rows are added to `skipped`,
    with the reason."""
    schema, fitting = build_schema(), []
    with contextlib.suppress(*_UNFIT):
        return pa.RecordBatch.from_pylist(rows, schema)
    for row in rows:
        with _skipping(row[FILE], skipped):
            pa.RecordBatch.from_pylist([row], schema)
            fitting.append(row)
    return pa.RecordBatch.from_pylist(fitting, schema)


def main() -> None:
    """Run a worker process: read the files named on standard input, and write their rows to standard output."""
    gc.disable()  # records have no reference cycles, but every garbage collection would traverse them
    root, files = json.load(sys.stdin)
    with pa.ipc.new_stream(sys.stdout.buffer, build_schema()) as stream:
        for batch in _extract_here(Path(root), [RecordFile(*file) for file in files]):
            about = {_SKIPPED: json.dumps(batch.skipped), _WARNED: json.dumps(batch.warned)}
            stream.write_batch(batch.rows, {_FILES: str(batch.files), **about})
