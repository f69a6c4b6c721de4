"""Reading the files of a results folder: regular ones only, for a pipe would wait for ever, a device has no end, and a
link may lead to what the folder does not hold.

A zip archive holds what the folder did that it was packed from, and is read in its place: `study.zip/0f3a` is a folder
in one, and `study.zip/0f3a/0.0/record.json` a file.
"""

import contextlib
import errno
import functools
import io
import os
import stat
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

RESULTS = Path("results/runs")
"""Folder of all studies' results, where no other is given."""

ARCHIVE = ".zip"
"""How the name of an archive ends."""

_MEMBER_LIMIT_BYTES = 2**28  # what is packed small may unpack to more than there is memory
_NO_ARCHIVE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OverflowError)


def get_cache_folder(variables: Mapping[str, str]) -> Path:
    """Return the folder for what can be made again. A relative one is ignored, as its standard wants: what is loaded
    from there would depend on the current folder."""
    given = Path(variables.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "zeroscale"


def open_regular(path: str, flags: int) -> int:
    """Open a file, as the `opener` of `open`; OSError for what is no regular file, links included."""
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "a link, which is not followed", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return descriptor


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one that it came of, says that there is no room: on the disk, or in the user's quota."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


def read_regular(path: Path) -> bytes:
    """Return what a regular file, or one in an archive, holds; OSError for what is none, links included."""
    try:
        with open(path, "rb", buffering=0, opener=open_regular) as file:
            return file.read()
    except NotADirectoryError:
        archive, name = split_archive(path)
        if archive is None:
            raise
    return _read_member(archive, name)


def split_archive(path: Path) -> tuple[Path | None, str]:
    """Return the archive that a path leads into, and the name in it: empty for the archive itself. The archive is None
    where it leads into none."""
    for place in (path, *path.parents):
        if place.suffix == ARCHIVE and place.is_file():
            return place, "" if place == path else path.relative_to(place).as_posix()
    return None, ""


def exists(path: Path) -> bool:
    """Whether there is such a file or folder, on the disk or in an archive."""
    archive, below = split_archive(path)
    if archive is None or not below:
        return path.exists()
    try:
        return bool(list_members(path))
    except OSError:
        return True  # reading it says what is wrong with the archive


def is_folder(path: Path) -> bool:
    """Whether a path is that of a folder, on the disk or in an archive, or of an archive itself."""
    if path.is_dir() or split_archive(path)[0] is None:
        return path.is_dir()
    try:
        return "" not in list_members(path)
    except OSError:
        return True


def list_members(path: Path) -> dict[str, int]:
    """Return the files in an archive, or below a folder in one, with their sizes in bytes; a file in one itself has an
    empty name. OSError for what is no archive, or holds a name that leads out of it."""
    archive, below = split_archive(path)
    if archive is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with _as_os_error(archive):
        found = {info.filename: info.file_size for info in _open_archive(archive).infolist() if not info.is_dir()}
    for name in found:
        if PurePosixPath(name).as_posix() != name or name.startswith("/") or ".." in name.split("/"):
            raise OSError(errno.EINVAL, f"an archive with a name that leads out of it, {name!r}", str(archive))
    if below in found:
        return {"": found[below]}
    beginning = f"{below}/" if below else ""
    return {name.removeprefix(beginning): size for name, size in sorted(found.items()) if name.startswith(beginning)}


def list_packed(archive: Path) -> dict[str, int]:
    """Return the files in an archive that lies in a folder, without those that lie unpacked beside it as well."""
    beside = archive.with_suffix(""), archive.parent
    return {
        name: size
        for name, size in list_members(archive).items()
        if not any((folder / name).exists() for folder in beside)
    }


def unpack(path: Path, folder: Path) -> None:
    """Write the files in an archive, or below a folder in one, into a folder; OSError for what is no archive."""
    for name in list_members(path):
        unpacked = folder / name
        unpacked.parent.mkdir(parents=True, exist_ok=True)
        unpacked.write_bytes(read_regular(path / name))


def pack(members: Mapping[str, bytes]) -> bytes:
    """Return an archive of files, given by their names in it; equal files make equal bytes."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, member in sorted(members.items()):
            info = zipfile.ZipInfo(name)  # as of 1 January 1980
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(info, member, zipfile.ZIP_DEFLATED, compresslevel=9)
    return content.getvalue()


def read_whole(folder: Path) -> dict[str, bytes]:
    """Return what the files below a folder hold, by their paths below it; without links and hidden files."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    visible = (path for path in paths if not any(part.startswith(".") for part in path.parts))
    return {path.as_posix(): read_regular(folder / path) for path in visible}


def _read_member(archive: Path, name: str) -> bytes:
    with _as_os_error(archive):
        try:
            with _open_archive(archive).open(name) as member:
                content = member.read(_MEMBER_LIMIT_BYTES + 1)
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(archive / name)) from None
    if len(content) > _MEMBER_LIMIT_BYTES:
        raise OSError(errno.EFBIG, f"more than {_MEMBER_LIMIT_BYTES >> 20} MiB", str(archive / name))
    return content


def _open_archive(path: Path) -> zipfile.ZipFile:
    """Return an archive, which stays open for its next member while it is the same file."""
    info = path.stat()
    return _open_version(str(path), info.st_dev, info.st_ino, info.st_ctime_ns, os.getpid())


@functools.lru_cache(maxsize=4)
def _open_version(path: str, *version: int) -> zipfile.ZipFile:  # a process's own: forks share the place in a file
    return zipfile.ZipFile(open(path, "rb", opener=open_regular))


@contextlib.contextmanager
def _as_os_error(archive: Path) -> Iterator[None]:
    """Raise what `zipfile` says of a torn, encrypted or foreign archive as OSError."""
    try:
        yield
    except _NO_ARCHIVE as error:
        raise OSError(errno.EINVAL, f"not an archive that can be read: {error}", str(archive)) from error
