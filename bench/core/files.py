"""Files: the regular files of a results folder, YAML files that users write, and the configuration that comes with the
project.

A results folder is read with care: a pipe would block for ever, a device has no end, a link may lead elsewhere.
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
from typing import Any

import yaml

from bench.core.errors import UserError
from bench.core.private import mask_tokens

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
    """Return the content of all files below a folder, by path; without links and hidden files.

    Tokens are masked in text, because a scheduler's log of a job may hold some. A file with a NUL byte is no text.
    """
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    visible = (path for path in paths if not any(part.startswith(".") for part in path.parts))
    contents = ((path.as_posix(), read_regular(folder / path)) for path in visible)
    return {name: content if b"\0" in content else mask_tokens(content) for name, content in contents}


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


_MOST_VALUES = 100_000
"""With aliases written out: a few lines of them can stand for more than any memory holds."""


def read_yaml(path: Path, called: str) -> dict[str, Any]:
    """Return the file's keys and values, interpolations left as they are; UserError, which begins with `called`, for
    what is no mapping of words to values."""
    from omegaconf import OmegaConf  # imported here: who only reads results waits for none of it

    try:
        tree = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if _count_values(tree, {}) > _MOST_VALUES:
            raise _build_error(path, called, f"more than {_MOST_VALUES:,} values, aliases written out")
        plain = OmegaConf.to_container(OmegaConf.load(path)) if isinstance(tree, yaml.MappingNode) else None
    except UserError:
        raise
    except Exception as error:  # OmegaConf and yaml raise whatever they like for a file that is none
        raise _build_error(path, called, format_reason(error)) from error
    if not isinstance(plain, dict) or not all(isinstance(key, str) for key in plain):
        raise _build_error(path, called, "not a mapping of words to values")
    return {str(key): value for key, value in plain.items()}


def format_reason(error: Exception) -> str:
    """Return in one line why a file could not be read."""
    if isinstance(error, RecursionError):
        return "contains itself, or is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return "not text in UTF-8"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, yaml.MarkedYAMLError) and error.problem:
        context = f"{error.context}: " if error.context else ""
        where = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        return f"{context}{error.problem}{where}"
    first = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return " ".join(first.split())[:200]


def _build_error(path: Path, called: str, why: str) -> UserError:
    shown = str(path) if str(path).isprintable() else repr(str(path))
    return UserError(called, f"{shown}: {why}", "correct the file")


def _count_values(node: yaml.Node | None, known: dict[int, int | None]) -> int:
    """Return how many values stand below a node, one that is shared counted wherever it stands; RecursionError for one
    that contains itself."""
    if node is None:
        return 0
    if id(node) not in known:
        known[id(node)] = None
        below = node.value if isinstance(node, yaml.SequenceNode | yaml.MappingNode) else []
        parts = [part for pair in below for part in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(_count_values(part, known) for part in parts)
    if (count := known[id(node)]) is None:
        raise RecursionError
    return count


def find_conf_folder() -> Path:
    """Return the folder of the configuration files: beside the packages in a checkout, inside `bench` in a wheel."""
    inside = Path(__file__).parents[1] / "conf"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "conf"


def list_engine_presets() -> tuple[str, ...]:
    """Return the names of the files in conf/engine, sorted."""
    return tuple(sorted(path.stem for path in (find_conf_folder() / "engine").glob("*.yaml")))


@functools.cache
def read_engine_preset(name: str) -> Mapping[str, Any]:
    """Return the options that conf/engine/<name>.yaml writes out; none where the project has no such file."""
    path = find_conf_folder() / "engine" / f"{name}.yaml"
    plain = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {option: value for option, value in plain.items() if option not in ("name", "backend")}


@functools.cache
def read_model_counts() -> Mapping[str, int | None]:
    """Return the published number of parameters of every file in conf/model, by its name."""
    files = (find_conf_folder() / "model").glob("*.yaml")
    return {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")).get("parameters") for path in files}
