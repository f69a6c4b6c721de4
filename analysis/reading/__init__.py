"""Reading of all records in results folders and archives. Unreadable files are reported, never dropped silently."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from analysis.reading import consolidated, rows
from analysis.reading.extraction import Follow, extract
from analysis.reading.rows import FILE, RecordFile, RecordRows
from analysis.reading.walk import is_utf8
from bench.core.errors import UserError
from bench.core.files import exists, is_folder
from bench.core.record import RunRecord
from bench.core.store import Unreadable, read_record


class FoundRows(NamedTuple):
    """Table rows of all records found at some paths."""

    rows: RecordRows  # sorted by `analysis.reading.rows.sort_places`
    skipped: tuple[Unreadable, ...]  # files that are corrupt or no records, with the reason
    unfinished: tuple[Path, ...]  # folders of attempts without a record: still running, or killed with their supervisor
    copies: int = 0  # records that were left out, because they are copies of another record

    def read_records(self) -> dict[Path, RunRecord]:
        """Return the complete records by file, in the order of the rows. This is slow for many records."""
        return {file: read_record(file) for file in map(Path, self.rows.core.column(FILE).to_pylist())}


def find_rows(paths: Iterable[Path], follow: Follow = lambda read, files: None) -> FoundRows:
    """Return the rows of every `record.json` at or below `paths`, also in archives. Each file is read once. If several
    files are copies of one record, only the first file has a row.

    `follow` is the progress callback for files that are not cached. Raise UserError for a path that does not exist.
    """
    given = [Path(os.path.realpath(path)) if path.is_symlink() and not path.is_dir() else path for path in paths]
    for path in given:
        if not exists(path):
            raise UserError(str(path), "no such file or folder", "give a results folder, e.g. results/runs/smoke")
        if not is_utf8(str(path)):
            raise UserError(repr(str(path)), "name is not UTF-8", "rename it")
    folders = list(filter(is_folder, given))
    files = [path for path in given if path not in folders]
    parts = [_find_below(path, follow) for path in folders]
    if files:
        table, unreadable = extract(Path(), [RecordFile(str(file)) for file in files])
        skipped_files = tuple(Unreadable(Path(file), why) for file, why in unreadable.items())
        parts.append(FoundRows(rows.split_table(table), skipped_files, ()))
    together = rows.join_rows([part.rows for part in parts])
    if len(given) > 1:
        together = together.take(_select_unique(together.core))
    distinct = rows.select_distinct(together.core)
    copies = len(together.core) - len(distinct)
    if copies:
        together = together.take(distinct)
    skipped = {os.path.realpath(one.path): one for part in reversed(parts) for one in part.skipped}
    unfinished = {os.path.realpath(folder): folder for part in reversed(parts) for folder in part.unfinished}
    by_path = sorted(skipped.values(), key=lambda one: one.path)
    return FoundRows(together, tuple(by_path), tuple(sorted(unfinished.values())), copies)


def _find_below(folder: Path, follow: Follow) -> FoundRows:
    """Return the rows of the records below a folder. The file paths in the rows begin with the path of the folder."""
    found, skipped, unfinished = consolidated.read_folder(folder, follow)
    place = found.core.column_names.index(FILE)
    beginning = "" if folder == Path() else f"{folder}/"
    paths = pc.binary_join_element_wise(beginning, found.core.column(FILE), "")
    unreadable = tuple(Unreadable(folder / file, why) for file, why in skipped.items())
    core = found.core.set_column(place, FILE, paths)
    return FoundRows(found._replace(core=core), unreadable, tuple(folder / attempt for attempt in unfinished))


def _select_unique(core: pa.Table) -> "pa.Array":
    """Return the indices of the rows to keep, in sorted order. A file that was found below two paths is kept once."""
    first: dict[object, int] = {}
    for place, path in enumerate(map(Path, core.column(FILE).to_pylist())):
        first.setdefault(_build_file_key(path), place)
    kept = pa.array(first.values(), pa.int64())
    return kept.take(rows.sort_places(core.take(kept)))


def _build_file_key(path: Path) -> object:
    try:
        info = path.stat()
    except (FileNotFoundError, NotADirectoryError):  # deleted since it was read, or inside an archive
        return os.path.realpath(path)
    return info.st_dev, info.st_ino
