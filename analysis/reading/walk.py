"""What lies in a results folder or archive: its records, the attempts without one, and whether any of it has changed
since.

The time at which the file system last changed a file or a folder cannot be set by anybody, so what tells the same time
holds the same: a folder's changes with every name in it. One that changed while, or shortly before, it was looked at
may change again within the same tick of the clock; it counts as changed.
"""

import os
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from time import time_ns
from typing import NamedTuple

from analysis.reading.rows import RecordFile
from bench.core import files
from bench.core.store import CIRCUMSTANCE, RECORD

SETTLED_NS = 2_000_000_000
UNSETTLED = 0
"""A time at which no file has changed."""

_stat = os.stat  # Path's own takes several times as long, and there are many


class FolderTree(NamedTuple):
    """What lies in a folder or archive, by paths below it."""

    files: list[RecordFile]  # called record.json, sorted; of several links to one, the first
    folders: dict[str, int]  # when each last changed, in ns, the folder itself included
    archives: dict[str, int]  # the same of archives
    unfinished: list[str]  # attempts without a record
    closed: dict[str, str]  # what cannot be looked into, and why


def walk(root: Path) -> FolderTree:
    """Look through a folder and all folders and archives below it, or through an archive or a folder in one; links are
    not followed."""
    latest = time_ns() - SETTLED_NS
    tree = FolderTree([], {}, {}, [], {})
    found: list[tuple[str, os.DirEntry[str]]] = []
    started: list[str] = []
    left = [""]
    if files.split_archive(root)[0]:
        left.clear()
        started += _add_members(root, "", latest, tree)
    while left:
        folder = left.pop()
        for path, entry in _list_entries(root, folder, latest, tree):
            if entry.is_dir(follow_symlinks=False):
                left.append(path)
            elif entry.name.endswith(files.ARCHIVE) and entry.is_file(follow_symlinks=False):
                started += _add_members(root, path, latest, tree)
            if entry.name == RECORD and entry.is_file(follow_symlinks=False):
                found.append((path, entry))
            elif entry.name == RECORD:
                tree.closed[path] = "a link, which is not followed" if entry.is_symlink() else "not a regular file"
            elif entry.name == CIRCUMSTANCE:
                started.append(folder)
    tree.files.extend(_list_record_files(sorted(found, key=itemgetter(0)), latest))
    with_record = {path.rpartition("/")[0] for path in (*tree.closed, *(file.path for file in tree.files))}
    tree.unfinished.extend(sorted(set(started) - with_record))
    return tree


def is_unchanged(root: Path, tree: FolderTree, records: Iterable[tuple[str, int, int]]) -> bool:
    """Whether a folder or archive holds what it held when this was told of it."""
    beginning, packed = f"{root}/", tuple(f"{path}/" for path in tree.archives)
    places = tree.folders | tree.archives
    try:
        if "" in tree.archives:
            return _read_changed_ns(root) == tree.archives[""]
        return all(_stat(beginning + path).st_ctime_ns == changed_ns for path, changed_ns in places.items()) and all(
            _is_as_recorded(_stat(beginning + path), size, changed_ns)
            for path, size, changed_ns in records
            if not path.startswith(packed)  # those are as old as their archives
        )
    except OSError:
        return False


def _is_as_recorded(now: os.stat_result, size: int, changed_ns: int) -> bool:
    return now.st_ctime_ns == changed_ns and now.st_size == size


def _add_members(root: Path, path: str, latest: int, tree: FolderTree) -> list[str]:
    """Add what lies in an archive, and return the folders in it of attempts that were started."""
    beginning, list_files = (f"{path}/", files.list_packed) if path else ("", files.list_members)
    try:
        tree.archives[path] = changed_ns = _round_unsettled(_read_changed_ns(root / path), latest)
        members = {beginning + name: size for name, size in list_files(root / path).items()}
    except OSError as error:
        tree.closed[path] = error.strerror or str(error)
        return []
    tree.files.extend(
        RecordFile(name, size, changed_ns) for name, size in members.items() if name.rpartition("/")[2] == RECORD
    )
    return [name.rpartition("/")[0] for name in members if name.rpartition("/")[2] == CIRCUMSTANCE]


def _read_changed_ns(path: Path) -> int:
    """Return when a file, or the archive that it is in, last changed."""
    return _stat(files.split_archive(path)[0] or path).st_ctime_ns


def _list_entries(root: Path, folder: str, latest: int, tree: FolderTree) -> Iterator[tuple[str, "os.DirEntry[str]"]]:
    """Yield what lies in a folder, with its path; a folder that is gone held nothing."""
    path = f"{root}/{folder}"
    try:
        tree.folders[folder] = _round_unsettled(_stat(path).st_ctime_ns, latest)  # before it is looked into
        for entry in os.scandir(path):
            place = f"{folder}/{entry.name}" if folder else entry.name
            if place.isascii() or is_utf8(place):
                yield place, entry
            else:
                tree.closed[place] = "its name is not UTF-8"
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        tree.closed[folder] = error.strerror or str(error)


def is_utf8(name: str) -> bool:
    """Whether a name is text that can be written."""
    try:
        name.encode()
    except UnicodeEncodeError:  # bytes that Python stands other characters for
        return False
    return True


def _list_record_files(found: Iterable[tuple[str, "os.DirEntry[str]"]], latest: int) -> Iterator[RecordFile]:
    seen = set()
    for path, entry in found:
        try:
            info = entry.stat()
        except OSError:  # a link to nowhere; whoever reads it says so
            yield RecordFile(path)
            continue
        if (info.st_dev, info.st_ino) not in seen:
            seen.add((info.st_dev, info.st_ino))
            yield RecordFile(path, info.st_size, _round_unsettled(info.st_ctime_ns, latest))


def _round_unsettled(changed_ns: int, latest: int) -> int:
    return changed_ns if changed_ns <= latest else UNSETTLED
