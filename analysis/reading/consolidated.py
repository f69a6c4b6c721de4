"""Cache of the rows of a results folder or archive: one Parquet file in the user's cache folder.

The cache is rebuilt if it is missing or corrupt, or if the source code that computes rows has changed since it was
written. Records that changed are read again. Nothing is written into the results folder. Small folders have no cache,
because reading their records takes no longer than reading a cache.
"""

import contextlib
import functools
import hashlib
import io
import json
import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pyarrow as pa
import pyarrow.parquet as pq
import scipy

import bench
from analysis.columns import list_all_columns
from analysis.reading import rows
from analysis.reading.extraction import Follow, extract
from analysis.reading.rows import CHANGED, FILE, SIZE, TRACES, RecordFile, RecordRows
from analysis.reading.walk import FolderTree, is_unchanged, walk
from bench.core import installed_plugins
from bench.core.files import get_cache_folder
from bench.core.store import write_atomically

LEAST = 200
"""Smallest number of records for which a folder is cached."""

_ABOUT = b"zeroscale"
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, pa.ArrowException)
# globs of the source files that compute rows; a change in any of them makes the cache invalid
_FORMULAS = {
    Path(__file__).parents[1]: ("*.py", "metrics/*.py", "reading/*.py", "stats/*.py"),
    Path(str(bench.__file__)).parent: (
        "*.py", "predict/*.py", "models/*.py", "models/*/shape.py", "engines/*.py", "engines/*/facts.py",
        "engines/*/options.py",
    ),
}  # fmt: skip

_log = logging.getLogger(__name__)


class FolderRows(NamedTuple):
    """Contents of a results folder. All paths are relative to the folder."""

    rows: RecordRows  # sorted by `analysis.reading.rows.sort_places`
    skipped: dict[str, str]  # files that could not be read as records, with the reason
    unfinished: list[str]  # folders of attempts without a record


class _CachedRows(NamedTuple):
    rows: RecordRows
    tree: FolderTree  # without record files, which are in columns of the rows
    skipped: list[str]

    def files(self) -> Iterator[tuple[str, int, int]]:
        """Yield the path, size and time of change of every cached record file. Plain tuples are faster than
        `RecordFile`."""
        return zip(*(self.rows.core.column(name).to_pylist() for name in (FILE, SIZE, CHANGED)), strict=True)


def read_folder(root: Path, follow: Follow) -> FolderRows:
    """Return the contents of a results folder, from its cache if the cache is up to date. `follow` is the progress
    callback."""
    kept = _load(root)
    if kept and is_unchanged(root, kept.tree, kept.files()):
        table, skipped = extract(root, [RecordFile(path) for path in kept.skipped])  # a failure may be temporary
        if not len(table):
            return FolderRows(kept.rows, skipped | kept.tree.closed, kept.tree.unfinished)
    tree = walk(root)
    table, skipped = _build_table(root, tree, kept, follow)
    found = rows.split_table(table.take(rows.sort_places(table)))
    # Rows in which a broken plug-in left cells empty are not cached, so that the next command repeats the warning.
    if len(tree.files) >= LEAST and not installed_plugins.warned:
        _write_cache(root, found, tree, list(skipped))
    return FolderRows(found, skipped | tree.closed, tree.unfinished)


def _build_table(
    root: Path, tree: FolderTree, kept: _CachedRows | None, follow: Follow
) -> tuple[pa.Table, dict[str, str]]:
    """Return the rows of all record files of a folder, and the skipped files with the reason. Rows of unchanged files
    come from the cache."""
    old: dict[tuple[str, int, int], int] = {file: place for place, file in enumerate(kept.files() if kept else ())}
    table, skipped = extract(root, [file for file in tree.files if file not in old or not file.changed_ns], follow)
    if kept:
        places = [old[file] for file in tree.files if file in old and file.changed_ns]
        table = pa.concat_tables([table, kept.rows.whole().take(pa.array(places, pa.int64()))])
    return table, skipped


def _load(root: Path) -> _CachedRows | None:
    """Return the cached rows of a folder; None if there is no readable cache, or if another version of the code wrote
    it."""
    path = _build_cache_path(root)
    try:
        file = pq.ParquetFile(path, page_checksum_verification=True)
        about = _unseal(file.schema_arrow.metadata[_ABOUT])
        if about["formulas"] == _formulas() and file.schema_arrow.equals(rows.build_schema()):
            core = _read_columns(file, [name for name in file.schema_arrow.names if name not in TRACES])
            traces = functools.partial(_read_traces, root, path, file, core.column(FILE))
            tree = FolderTree([], *(about[name] for name in FolderTree._fields[1:]))
            return _CachedRows(RecordRows(core, functools.cache(traces)), tree, about["skipped"])
    except _UNREADABLE as error:
        _log.debug("%s: %s", path, error)
    return None


def _read_traces(root: Path, path: Path, file: pq.ParquetFile, files: pa.ChunkedArray) -> pa.Table:
    """Return the traces (lists of values by step or rank) of `files` from the cache at `path`. If the cached traces are
    corrupt, read the records instead."""
    try:
        return _read_columns(file, list(TRACES))
    except _UNREADABLE as error:
        _log.debug("%s: %s", path, error)
    with contextlib.suppress(OSError):
        path.unlink()  # so that the next read rebuilds it
    again, _ = extract(root, list(map(RecordFile, files.to_pylist())))
    places = {name: place for place, name in enumerate(again.column(FILE).to_pylist())}
    return again.select(list(TRACES)).take(pa.array([places[name] for name in files.to_pylist()], pa.int64()))


def _read_columns(file: pq.ParquetFile, names: list[str]) -> pa.Table:
    return file.read(columns=names).replace_schema_metadata()


def _write_cache(root: Path, found: RecordRows, tree: FolderTree, skipped: Sequence[str]) -> None:
    """Write the cache of a folder. A failure is only logged, and the next read then repeats the work."""
    about = {"formulas": _formulas(), "skipped": skipped} | tree._replace(files=[])._asdict()
    text = json.dumps(about).encode()
    sealed = b"%08x %s" % (zlib.crc32(text), text)  # Parquet has checksums for pages only, not for metadata
    table = found.whole().replace_schema_metadata({_ABOUT: sealed})
    text_columns = [field.name for field in table.schema if str(field.type).endswith("string")]
    content = io.BytesIO()
    pq.write_table(table, content, compression="zstd", use_dictionary=text_columns, write_page_checksum=True)
    path = _build_cache_path(root)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content.getvalue())
    except OSError as error:
        _log.debug("%s: %s", path, error)


def _unseal(sealed: bytes) -> dict[str, Any]:
    checksum, _, text = sealed.partition(b" ")
    if int(checksum, 16) != zlib.crc32(text):
        raise ValueError("its checksum is wrong")
    about: dict[str, Any] = json.loads(text)
    return about


def _build_cache_path(root: Path) -> Path:
    name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]
    return get_cache_folder(os.environ) / "consolidated" / f"{name}.parquet"


def _formulas() -> str:
    """Return a digest of everything, except the records themselves, that the rows depend on.

    This includes the source code of zeroscale, the versions of numpy and scipy, and installed plug-ins with metrics,
    model families and engines.
    """
    versions = [numpy.__version__, scipy.__version__, *list_all_columns()]
    digest = hashlib.sha256(json.dumps(versions).encode())
    for folder, patterns in _FORMULAS.items():
        for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
            digest.update(path.read_bytes())
    for kind in ("metric", "family", "engine"):
        for path in installed_plugins.list_installed_files(kind):
            digest.update(path.read_bytes())
    return digest.hexdigest()
