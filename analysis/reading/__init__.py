"""Read the records of results folders; what cannot be read is named and counted, never dropped in silence."""

import os
from collections.abc import Iterable, Sequence
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


class Reading(NamedTuple):
    """Records in memory, as they might have been found at some paths."""

    records: dict[Path, RunRecord]  # by file, in the order in which people look for them
    skipped: tuple[Unreadable, ...]  # corrupt or foreign files, each with its reason
    unfinished: tuple[Path, ...]  # attempts without a record: still running, or killed with everything around them


class FoundRows(NamedTuple):
    """What was found at some paths."""

    rows: RecordRows  # in the order in which people look for them
    skipped: tuple[Unreadable, ...]
    unfinished: tuple[Path, ...]


def find_rows(paths: Iterable[Path], follow: Follow = lambda read, files: None) -> FoundRows:
    """Read every `record.json` at or below `paths`, those in archives too, each file once; `follow` hears how many of
    those of a folder that were not read before. UserError for a path that is not there."""
    given = [Path(os.path.realpath(path)) if path.is_symlink() and not path.is_dir() else path for path in paths]
    for path in given:
        if not exists(path):
            raise UserError(str(path), "no such file or folder", "give a results folder, e.g. results/runs/smoke")
        if not is_utf8(str(path)):
            raise UserError(repr(str(path)), "a name that is not UTF-8", "rename it")
    folders = list(filter(is_folder, given))
    files = [path for path in given if path not in folders]
    parts = [*(_find_below(path, follow) for path in folders), *([_read_single_files(files)] if files else [])]
    together = rows.join_rows([part.rows for part in parts])
    if len(given) > 1:
        together = together.take(_select_unique(together.core))
    skipped = {os.path.realpath(one.path): one for part in reversed(parts) for one in part.skipped}
    unfinished = {os.path.realpath(folder): folder for part in reversed(parts) for folder in part.unfinished}
    by_path = sorted(skipped.values(), key=lambda one: one.path)
    return FoundRows(together, tuple(by_path), tuple(sorted(unfinished.values())))


def read_records(paths: Iterable[Path]) -> Reading:
    """Read whole records, which takes long for many."""
    found = find_rows(paths)
    files = map(Path, found.rows.core.column(FILE).to_pylist())
    return Reading({file: read_record(file) for file in files}, found.skipped, found.unfinished)


def _find_below(folder: Path, follow: Follow) -> FoundRows:
    """Return what was found in a folder, with paths that begin as the folder's does."""
    found, skipped, unfinished = consolidated.read_folder(folder, follow)
    place = found.core.column_names.index(FILE)
    beginning = "" if folder == Path() else f"{folder}/"
    paths = pc.binary_join_element_wise(beginning, found.core.column(FILE), "")
    unreadable = tuple(Unreadable(folder / file, why) for file, why in skipped.items())
    core = found.core.set_column(place, FILE, paths)
    return FoundRows(found._replace(core=core), unreadable, tuple(folder / attempt for attempt in unfinished))


def _read_single_files(files: Sequence[Path]) -> FoundRows:
    """Return what was found in files that were given one by one."""
    table, skipped = extract(Path(), [RecordFile(str(file)) for file in files])
    return FoundRows(rows.split_table(table), tuple(Unreadable(Path(file), why) for file, why in skipped.items()), ())


def _select_unique(core: pa.Table) -> "pa.Array":
    """Return the places of rows in their order, of a file that lies below two of the paths the first one."""
    first: dict[object, int] = {}
    for place, path in enumerate(map(Path, core.column(FILE).to_pylist())):
        first.setdefault(_build_file_key(path), place)
    kept = pa.array(first.values(), pa.int64())
    return kept.take(rows.sort_places(core.take(kept)))


def _build_file_key(path: Path) -> object:
    try:
        info = path.stat()
    except (FileNotFoundError, NotADirectoryError):  # it was read and is gone, or lies in an archive
        return os.path.realpath(path)
    return info.st_dev, info.st_ino
