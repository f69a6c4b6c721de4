"""Files: regular files of a results folder and of archives, YAML files of users, and the configuration that ships.

Only regular files of a results folder are read: a pipe would block for ever, a device has no end, and a link may lead
elsewhere.
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
"""Default folder for the results of all studies."""

ARCHIVE = ".zip"
"""Suffix of an archive."""

_MEMBER_LIMIT_BYTES = 2**28  # a small archive may unpack to more than fits into memory
# zipfile documents BadZipFile alone, but raises any of these for torn, encrypted or foreign archives.
_NO_ARCHIVE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OverflowError)


def get_cache_folder(variables: Mapping[str, str]) -> Path:
    """Return the folder for reproducible files. As the XDG standard demands, a relative XDG_CACHE_HOME is ignored."""
    given = Path(variables.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "zeroscale"


def open_regular(path: str, flags: int) -> int:
    """Open a regular file, as the `opener` of `open`; OSError for anything else, links included."""
    try:
        # O_NONBLOCK: opening a pipe would otherwise wait for a writer, for ever.
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
    """Return True if an error or its causes report a full disk or an exhausted quota."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file, on the disk or in an archive; OSError for anything else, links included."""
    try:
        with open(path, "rb", buffering=0, opener=open_regular) as file:
            return file.read()
    except NotADirectoryError:
        archive, name = split_archive(path)
        if archive is None:
            raise
    with _as_os_error(archive):
        try:
            with _open_archive(archive).open(name) as member:
                content = member.read(_MEMBER_LIMIT_BYTES + 1)
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(archive / name)) from None
    if len(content) > _MEMBER_LIMIT_BYTES:
        raise OSError(errno.EFBIG, f"more than {_MEMBER_LIMIT_BYTES >> 20} MiB", str(archive / name))
    return content


def split_archive(path: Path) -> tuple[Path | None, str]:
    """Return the archive (None without one) on a path, and the rest of the path: empty for the archive itself."""
    for place in (path, *path.parents):
        if place.suffix == ARCHIVE and place.is_file():
            return place, "" if place == path else path.relative_to(place).as_posix()
    return None, ""


def exists(path: Path) -> bool:
    """Return True for an existing file or folder, on the disk or in an archive."""
    archive, below = split_archive(path)
    if archive is None or not below:
        return path.exists()
    try:
        return bool(list_members(path))
    except OSError:
        return True  # reading it reports the error of the archive


def is_folder(path: Path) -> bool:
    """Return True for a folder, on the disk or in an archive, and for an archive."""
    if path.is_dir() or split_archive(path)[0] is None:
        return path.is_dir()
    try:
        return "" not in list_members(path)
    except OSError:
        return True


def list_members(path: Path) -> dict[str, int]:
    """Return the sizes in bytes of the files in an archive or in a folder in it, by name relative to `path`.

    For a file in an archive, the only name is empty. OSError for an unreadable archive, and for names that lead out.
    """
    archive, below = split_archive(path)
    if archive is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with _as_os_error(archive):
        found = {info.filename: info.file_size for info in _open_archive(archive).infolist() if not info.is_dir()}
    # `unpack` would write ../x outside its folder.
    for name in found:
        if PurePosixPath(name).as_posix() != name or name.startswith("/") or ".." in name.split("/"):
            raise OSError(errno.EINVAL, f"an archive with a path outside of it, {name!r}", str(archive))
    if below in found:
        return {"": found[below]}
    beginning = f"{below}/" if below else ""
    return {name.removeprefix(beginning): size for name, size in sorted(found.items()) if name.startswith(beginning)}


def list_packed(archive: Path) -> dict[str, int]:
    """Return the files in an archive by name, without those that are also unpacked next to it."""
    folders = archive.with_suffix(""), archive.parent
    found = list_members(archive).items()
    return {name: size for name, size in found if not any((folder / name).exists() for folder in folders)}


def unpack(path: Path, folder: Path) -> None:
    """Write the files in an archive, or in a folder in it, into `folder`; OSError for an unreadable archive."""
    for name in list_members(path):
        unpacked = folder / name
        unpacked.parent.mkdir(parents=True, exist_ok=True)
        unpacked.write_bytes(read_regular(path / name))


def pack(members: Mapping[str, bytes]) -> bytes:
    """Return an archive of the files' contents by name. Equal files make equal bytes."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, member in sorted(members.items()):
            info = zipfile.ZipInfo(name)  # with a fixed date, 1 January 1980
            # ZipInfo has no permissions by default, and tools would then unpack files without any.
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(info, member, zipfile.ZIP_DEFLATED, compresslevel=9)
    return content.getvalue()


def read_whole(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder, by path; without links and hidden files.

    Access tokens are masked in logs and other texts, because a scheduler writes the log of a job without a mask.
    """
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    visible = (path for path in paths if not any(part.startswith(".") for part in path.parts))
    contents = {path.as_posix(): read_regular(folder / path) for path in visible}
    # A binary file has a NUL byte and must keep its length. A log may have some by a network file system.
    texts = {name for name, content in contents.items() if name.endswith(".log") or b"\0" not in content}
    return {name: mask_tokens(content) if name in texts else content for name, content in contents.items()}


def _open_archive(path: Path) -> zipfile.ZipFile:
    """Return an archive, which stays open for its next member until its file changes."""
    info = path.stat()
    # by process too, because forks share the position in an open file
    return _open_version(str(path), info.st_dev, info.st_ino, info.st_ctime_ns, os.getpid())


@functools.lru_cache(maxsize=4)
def _open_version(path: str, *version: int) -> zipfile.ZipFile:
    return zipfile.ZipFile(open(path, "rb", opener=open_regular))


@contextlib.contextmanager
def _as_os_error(archive: Path) -> Iterator[None]:
    """Raise errors of `zipfile` for torn, encrypted or foreign archives as OSError."""
    try:
        yield
    except _NO_ARCHIVE as error:
        raise OSError(errno.EINVAL, f"not an archive that can be read: {error}", str(archive)) from error


_MOST_VALUES = 100_000
"""Limit of a YAML file, aliases expanded: a few lines of aliases can expand to more than fits into any memory."""


def read_yaml(path: Path, called: str) -> dict[str, Any]:
    """Return the file's keys and values, interpolations unresolved; UserError, with `called` as its value, for a file
    without a mapping of words to values."""
    from omegaconf import OmegaConf  # imported here: slow, and reading results needs none of it

    try:
        # Counted before OmegaConf reads it, which would expand all aliases.
        tree = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if _count_values(tree, {}) > _MOST_VALUES:
            raise _build_error(path, called, f"more than {_MOST_VALUES:,} values, aliases expanded")
        plain = OmegaConf.to_container(OmegaConf.load(path)) if isinstance(tree, yaml.MappingNode) else None
    except UserError:
        raise
    except Exception as error:  # OmegaConf and yaml document no base class of their errors
        raise _build_error(path, called, format_reason(error)) from error
    if not isinstance(plain, dict) or not all(isinstance(key, str) for key in plain):
        raise _build_error(path, called, "not a mapping of words to values")
    return {str(key): value for key, value in plain.items()}


def format_reason(error: Exception) -> str:
    """Return the reason why a file is unreadable, in one line."""
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
    """Return the number of values below a node, with shared nodes counted at each place; RecursionError for a node that
    contains itself. `known` holds the counts by id, None for nodes in progress."""
    if node is None:
        return 0
    # Nodes are not hashable by value, and an alias is the same object as its anchor.
    if id(node) not in known:
        known[id(node)] = None
        below = node.value if isinstance(node, yaml.SequenceNode | yaml.MappingNode) else []
        parts = [part for pair in below for part in (pair if isinstance(pair, tuple) else (pair,))]
        known[id(node)] = 1 + sum(_count_values(part, known) for part in parts)
    if (count := known[id(node)]) is None:
        raise RecursionError
    return count


def find_conf_folder() -> Path:
    """Return the folder of the configuration files: next to the packages in a checkout, inside `bench` in a wheel."""
    # pyproject.toml puts conf/ into the package of a wheel.
    inside = Path(__file__).parents[1] / "conf"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "conf"


def list_engine_presets() -> tuple[str, ...]:
    """Return the names of the files in conf/engine, sorted."""
    return tuple(sorted(path.stem for path in (find_conf_folder() / "engine").glob("*.yaml")))


@functools.cache
def read_engine_preset(name: str) -> Mapping[str, Any]:
    """Return the options in conf/engine/<name>.yaml; empty if the project has no such file."""
    path = find_conf_folder() / "engine" / f"{name}.yaml"
    plain = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {option: value for option, value in plain.items() if option not in ("name", "backend")}


@functools.cache
def read_model_counts() -> Mapping[str, int | None]:
    """Return the published number of parameters in every file of conf/model, by the name of the file."""
    files = (find_conf_folder() / "model").glob("*.yaml")
    return {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")).get("parameters") for path in files}
