"""Listing of a results folder or archive: its records, attempts without a record, and detection of later changes.

Changes are detected by ctime, the file system's time of the last change, which programs cannot set. Equal ctimes mean
equal contents. The ctime of a folder changes whenever an entry in it is added, removed or renamed.

A file or folder that changed during the listing, or shortly before, may change again within the resolution of the
clock, without a new ctime. So it always counts as changed.
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
"""Minimum age, in ns, of a ctime that reliably reveals later changes. The reason is that some file systems store times
with a resolution of two seconds."""
UNSETTLED = 0
"""Value that replaces a recent ctime. It equals the ctime of no file, so the file always counts as changed."""

_stat = os.stat  # Path.stat takes several times as long, which matters for many files


class FolderTree(NamedTuple):
    """Contents of a folder or archive. All paths are relative to this folder or archive."""

    files: list[RecordFile]  # every record.json, sorted by path; of several hard links only the first
    folders: dict[str, int]  # ctime in ns of each folder, the root ("") included
    archives: dict[str, int]  # ctime in ns of each archive
    unfinished: list[str]  # folders of attempts without a record
    closed: dict[str, str]  # files and folders that cannot be read, with the reason


def walk(root: Path) -> FolderTree:
    """Return the contents of `root`: a folder with everything below it, an archive, or a folder inside an archive.

    Archives below a folder are included. Symbolic links are not followed.
    """
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
                tree.closed[path] = "is a link; links are not followed" if entry.is_symlink() else "not a regular file"
            elif entry.name == CIRCUMSTANCE:
                started.append(folder)
    tree.files.extend(_list_record_files(sorted(found, key=itemgetter(0)), latest))
    with_record = {path.rpartition("/")[0] for path in (*tree.closed, *(file.path for file in tree.files))}
    tree.unfinished.extend(sorted(set(started) - with_record))
    return tree


def is_unchanged(root: Path, tree: FolderTree, records: Iterable[tuple[str, int, int]]) -> bool:
    """Return True if nothing in a folder or archive has changed since `tree` and `records` were read.

    `records` holds the path, size in bytes and time of change in ns of every record file.
    """
    beginning, packed = f"{root}/", tuple(f"{path}/" for path in tree.archives)
    places = tree.folders | tree.archives
    try:
        if "" in tree.archives:
            return _read_changed_ns(root) == tree.archives[""]
        return all(_stat(beginning + path).st_ctime_ns == changed_ns for path, changed_ns in places.items()) and all(
            (now := _stat(beginning + path)).st_ctime_ns == changed_ns and now.st_size == size
            for path, size, changed_ns in records
            if not path.startswith(packed)  # files in archives have the ctime of the archive, which is checked above
        )
    except OSError:
        return False


def _add_members(root: Path, path: str, latest: int, tree: FolderTree) -> list[str]:
    """Add the records in the archive `path` to `tree`. Return the folders of all attempts (tries at a run) in the
    archive, with or without a record. If the archive's ctime in ns is above `latest`, it is too recent: a further
    change might not alter it. In this case, UNSETTLED is added to `tree` instead of the ctime."""
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
    """Return the ctime, in ns, of a file or of the archive that contains it."""
    return _stat(files.split_archive(path)[0] or path).st_ctime_ns


def _list_entries(root: Path, folder: str, latest: int, tree: FolderTree) -> Iterator[tuple[str, "os.DirEntry[str]"]]:
    """Yield the path and entry of everything in a folder; nothing if the folder was deleted. The folder's ctime in ns
    is added to `tree`. A ctime above `latest` is too recent: a further change might not alter it. In this case,
    UNSETTLED is added to `tree` instead of the ctime."""
    path = f"{root}/{folder}"
    try:
        # the ctime is read before the entries, so that later changes are noticed
        tree.folders[folder] = _round_unsettled(_stat(path).st_ctime_ns, latest)
        for entry in os.scandir(path):
            place = f"{folder}/{entry.name}" if folder else entry.name
            if place.isascii() or is_utf8(place):
                yield place, entry
            else:
                tree.closed[place] = "name is not UTF-8"
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        tree.closed[folder] = error.strerror or str(error)


def is_utf8(name: str) -> bool:
    """Return True if a file name can be encoded as UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:  # Python represents undecodable bytes as surrogates
        return False
    return True


def _list_record_files(found: Iterable[tuple[str, "os.DirEntry[str]"]], latest: int) -> Iterator[RecordFile]:
    seen = set()
    for path, entry in found:
        try:
            info = entry.stat()
        except OSError:  # a broken link, which the reader reports
            yield RecordFile(path)
            continue
        if (info.st_dev, info.st_ino) not in seen:
            seen.add((info.st_dev, info.st_ino))
            yield RecordFile(path, info.st_size, _round_unsettled(info.st_ctime_ns, latest))


def _round_unsettled(changed_ns: int, latest: int) -> int:
    return changed_ns if changed_ns <= latest else UNSETTLED
