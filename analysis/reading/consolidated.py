"""The rows of a results folder kept in one Parquet file beside its records, so that they are read once.

It holds nothing that the records do not: it is made again where it is missing, torn, of another version of zeroscale or
of other formulas, and a record that has changed since is read again. In a folder that cannot be written it lies in the
user's cache. Small folders are read as quickly without one.
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

import analysis
import bench
from analysis.columns import all_columns
from analysis.reading import rows
from analysis.reading.extraction import extract
from analysis.reading.rows import CHANGED, FILE, SIZE, TRACES, File, Rows
from analysis.reading.walk import CONSOLIDATED, Tree, unchanged, walk
from bench.store import write_atomically

LEAST = 200
"""Records from which on a folder gets a consolidated file."""

_ABOUT = b"zeroscale"
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, pa.ArrowException)
_FORMULAS = (
    ("*.py", "metrics/*.py", "reading/*.py", "stats/*.py"),
    ("*.py", "predict/*.py", "models/*.py", "engines/*/facts.py"),
)

_log = logging.getLogger(__name__)


class Folder(NamedTuple):
    """What a results folder holds; paths are below it."""

    rows: Rows  # in the order of `analysis.reading.rows.ordered`
    skipped: dict[str, str]  # what is no record, and why
    unfinished: list[str]  # attempts without a record


class _Kept(NamedTuple):
    rows: Rows
    tree: Tree  # without its files: the rows have theirs
    skipped: list[str]

    def files(self) -> Iterator[tuple[str, int, int]]:
        """Yield every `File` that the rows come from, as a plain tuple: there are many."""
        return zip(*(self.rows.core.column(name).to_pylist() for name in (FILE, SIZE, CHANGED)), strict=True)


def read(root: Path) -> Folder:
    """Return what a folder holds, from its consolidated file where that is as new as the records."""
    kept = _load(root)
    if kept and unchanged(root, kept.tree.names, kept.tree.folders, kept.files()):
        again = extract(root, [File(path) for path in kept.skipped])  # what kept it from being read may be over
        if not len(again.table):
            return Folder(kept.rows, again.skipped | kept.tree.closed, kept.tree.unfinished)
    tree = walk(root)
    table, skipped = _table(root, tree, kept)
    found = rows.of(table.take(rows.ordered(table)))
    if len(tree.files) >= LEAST:
        _keep(root, found, tree, list(skipped))
    return Folder(found, skipped | tree.closed, tree.unfinished)


def _table(root: Path, tree: Tree, kept: _Kept | None) -> tuple[pa.Table, dict[str, str]]:
    """Return the rows of a folder's files, those of unchanged ones from what was kept."""
    old: dict[tuple[str, int, int], int] = {}
    if kept:
        old = {file: place for place, file in enumerate(kept.files())}
    new = extract(root, [file for file in tree.files if file not in old or not file.changed_ns])
    parts = [new.table]
    if kept:
        places = [old[file] for file in tree.files if file in old and file.changed_ns]
        parts.append(kept.rows.whole().take(pa.array(places, pa.int64())))
    return pa.concat_tables(parts), new.skipped


def _load(root: Path) -> _Kept | None:
    """Return what was kept of a folder; None for nothing, or nothing that this version would have kept."""
    for path in sorted((root / CONSOLIDATED, _in_cache(root)), key=_age, reverse=True):
        try:
            file = pq.ParquetFile(path, page_checksum_verification=True)
            about = _opened(file.schema_arrow.metadata[_ABOUT])
            if about["formulas"] == _formulas() and file.schema_arrow.equals(rows.schema()):
                core = _columns(file, [name for name in file.schema_arrow.names if name not in TRACES])
                tree = Tree([], about["folders"], about["names"], about["unfinished"], about["closed"])
                traces = functools.partial(_traces, root, path, file, core.column(FILE))
                return _Kept(Rows(core, functools.cache(traces)), tree, about["skipped"])
        except _UNREADABLE as error:
            _log.debug("%s: %s", path, error)
    return None


def _traces(root: Path, path: Path, file: pq.ParquetFile, files: pa.ChunkedArray) -> pa.Table:
    """Return the traces of the records `files`; from those themselves, should the file at `path` be spoilt here."""
    try:
        return _columns(file, list(TRACES))
    except _UNREADABLE as error:
        _log.debug("%s: %s", path, error)
    with contextlib.suppress(OSError):
        path.unlink()  # so that it is made again
    again = extract(root, list(map(File, files.to_pylist()))).table
    places = {name: place for place, name in enumerate(again.column(FILE).to_pylist())}
    return again.select(list(TRACES)).take(pa.array([places[name] for name in files.to_pylist()], pa.int64()))


def _columns(file: pq.ParquetFile, names: list[str]) -> pa.Table:
    return file.read(columns=names).replace_schema_metadata()


def _keep(root: Path, found: Rows, tree: Tree, skipped: Sequence[str]) -> None:
    """Write what was found beside the records, or else into the cache; where neither can be written, it is read again
    next time."""
    about = {"formulas": _formulas(), "skipped": skipped} | tree._replace(files=[])._asdict()
    table = found.whole().replace_schema_metadata({_ABOUT: _sealed(about)})
    texts = [field.name for field in table.schema if str(field.type).endswith("string")]
    content = io.BytesIO()
    pq.write_table(table, content, compression="zstd", use_dictionary=texts, write_page_checksum=True)
    for path in (root / CONSOLIDATED, _in_cache(root)):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, content.getvalue())
            return
        except OSError as error:
            _log.debug("%s: %s", path, error)


def _sealed(about: dict[str, Any]) -> bytes:
    """Return a value as text with its own checksum: Parquet has checksums of its pages only."""
    text = json.dumps(about).encode()
    return b"%08x %s" % (zlib.crc32(text), text)


def _opened(sealed: bytes) -> dict[str, Any]:
    checksum, _, text = sealed.partition(b" ")
    if int(checksum, 16) != zlib.crc32(text):
        raise ValueError("its checksum is wrong")
    about: dict[str, Any] = json.loads(text)
    return about


def _in_cache(root: Path) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(os.fsencode(root.resolve())).hexdigest()[:16]
    return cache / "zeroscale" / "consolidated" / f"{name}.parquet"


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _formulas() -> str:
    """Return what the rows of equal records depend on: the code that makes them, and the libraries that it uses."""
    versions = [numpy.__version__, scipy.__version__, *all_columns()]
    told = hashlib.sha256(json.dumps(versions).encode())
    for package, patterns in zip((analysis, bench), _FORMULAS, strict=True):
        folder = Path(str(package.__file__)).parent
        for path in sorted(path for pattern in patterns for path in folder.glob(pattern)):
            told.update(path.read_bytes())
    return told.hexdigest()
