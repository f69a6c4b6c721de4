"""Read the records of results folders; what cannot be read is named and counted, never dropped in silence."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from analysis.reading import consolidated, rows
from analysis.reading.extraction import extract
from analysis.reading.rows import FILE, File, Rows
from analysis.reading.walk import in_utf8
from bench.errors import UserError
from bench.record import RunRecord
from bench.store import Unreadable, read_record


class Reading(NamedTuple):
    """Records in memory, as they might have been found at some paths."""

    records: dict[Path, RunRecord]  # by file, in the order in which people look for them
    skipped: tuple[Unreadable, ...]  # corrupt or foreign files, each with its reason
    unfinished: tuple[Path, ...]  # attempts without a record: still running, or killed with everything around them


class Found(NamedTuple):
    """What was found at some paths."""

    rows: Rows  # in the order in which people look for them
    skipped: tuple[Unreadable, ...]
    unfinished: tuple[Path, ...]


def find(paths: Iterable[Path]) -> Found:
    """Read every `record.json` at or below `paths`, each file once; UserError for a path that is not there."""
    given = list(paths)
    for path in given:
        if not path.exists():
            raise UserError(str(path), "no such file or folder", "give a results folder, e.g. results/runs/smoke")
        if not in_utf8(str(path)):
            raise UserError(repr(str(path)), "a name that is not UTF-8", "rename it")
    files = [Path(os.path.realpath(path)) if path.is_symlink() else path for path in given if not path.is_dir()]
    parts = [*(_below(path) for path in given if path.is_dir()), *([_alone(files)] if files else [])]
    together = rows.joined([part.rows for part in parts])
    if len(given) > 1:
        together = together.take(_once(together.core))
    skipped = {os.path.realpath(one.path): one for part in reversed(parts) for one in part.skipped}
    unfinished = {os.path.realpath(folder): folder for part in reversed(parts) for folder in part.unfinished}
    by_path = sorted(skipped.values(), key=lambda one: one.path)
    return Found(together, tuple(by_path), tuple(sorted(unfinished.values())))


def read(paths: Iterable[Path]) -> Reading:
    """Read whole records, which takes long for many."""
    found = find(paths)
    files = map(Path, found.rows.core.column(FILE).to_pylist())
    return Reading({file: read_record(file) for file in files}, found.skipped, found.unfinished)


def _below(folder: Path) -> Found:
    """Return what was found in a folder, with paths that begin as the folder's does."""
    found, skipped, unfinished = consolidated.read(folder)
    place = found.core.column_names.index(FILE)
    beginning = "" if folder == Path() else f"{folder}/"
    paths = pc.binary_join_element_wise(beginning, found.core.column(FILE), "")
    told = tuple(Unreadable(folder / file, why) for file, why in skipped.items())
    core = found.core.set_column(place, FILE, paths)
    return Found(found._replace(core=core), told, tuple(folder / attempt for attempt in unfinished))


def _alone(files: Sequence[Path]) -> Found:
    """Return what was found in files that were given one by one."""
    table, skipped = extract(Path(), [File(str(file)) for file in files])
    return Found(rows.of(table), tuple(Unreadable(Path(file), why) for file, why in skipped.items()), ())


def _once(core: pa.Table) -> "pa.Array":
    """Return the places of rows in their order, of a file that lies below two of the paths the first one."""
    first: dict[object, int] = {}
    for place, path in enumerate(map(Path, core.column(FILE).to_pylist())):
        first.setdefault(_identity(path), place)
    kept = pa.array(first.values(), pa.int64())
    return kept.take(rows.ordered(core.take(kept)))


def _identity(path: Path) -> object:
    try:
        told = path.stat()
    except FileNotFoundError:  # it was read and is gone
        return path
    return told.st_dev, told.st_ino
