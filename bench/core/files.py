"""File access: results folders and their zip archives, users' YAML files, and zeroscale's own config files.

Only regular files of a results folder are read. Reading a pipe would block for ever, a device file has no end, and a
link may lead outside the folder.
"""

import contextlib
import errno
import functools
import io
import os
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import pydantic_core
import yaml

from bench.core.errors import UserError
from bench.core.private import mask_tokens

RESULTS = Path("results/runs")
"""Default folder for the results of all studies, relative to the current folder."""

ARCHIVE = ".zip"
"""File name suffix of a results archive."""

_MEMBER_LIMIT_BYTES = 2**28  # a small archive may unpack to more than fits into memory
# zipfile documents BadZipFile alone, but raises any of these for truncated, encrypted or unsupported archives.
_NO_ARCHIVE = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OverflowError)


def get_cache_folder(variables: Mapping[str, str]) -> Path:
    """Return the folder for cached files, which can be deleted at any time. `variables` are environment variables. A
    relative XDG_CACHE_HOME is ignored, as the XDG standard requires."""
    given = Path(variables.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else Path.home() / ".cache") / "zeroscale"


def open_regular(path: str, flags: int) -> int:
    """Open a regular file and return its descriptor. Raise OSError for a link or any other kind of file. Can be given
    to `open` as its argument `opener`."""
    try:
        # O_NONBLOCK: opening a pipe would otherwise wait for a writer, for ever.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "is a symbolic link, and links are not followed", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return descriptor


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file does not exist or holds no JSON object."""
    try:
        plain = pydantic_core.from_json(read_regular(path), allow_inf_nan=False)
    except (OSError, ValueError):
        return None
    return plain if isinstance(plain, dict) else None


def is_disk_full(error: BaseException | None) -> bool:
    """Return True if an error, or an error that caused it, reports a full disk or an exceeded quota."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        error = error.__cause__
    return False


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file on the disk or in an archive. Raise OSError for a link or any other kind of
    file."""
    try:
        with open(path, "rb", buffering=0, opener=open_regular) as file:
            return file.read()
    except NotADirectoryError:
        archive, name = split_archive(path)
        if archive is None:
            raise
    with _as_os_error(archive):
        opened = _open_archive(archive)
    with _as_os_error(archive / name, "is damaged in its archive"):
        try:
            with opened.open(name) as member:
                content = member.read(_MEMBER_LIMIT_BYTES + 1)
        except KeyError:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(archive / name)) from None
    if len(content) > _MEMBER_LIMIT_BYTES:
        raise OSError(errno.EFBIG, f"is larger than {_MEMBER_LIMIT_BYTES >> 20} MiB", str(archive / name))
    return content


def split_archive(path: Path) -> tuple[Path | None, str]:
    """Split a path into the path of an archive and the path inside the archive. The inner path is empty for the archive
    itself. If the path contains no archive, return None and an empty path."""
    for place in (path, *path.parents):
        if place.suffix == ARCHIVE and place.is_file():
            return place, "" if place == path else path.relative_to(place).as_posix()
    return None, ""


def exists(path: Path) -> bool:
    """Return True if a file or folder exists, on the disk or in an archive."""
    archive, below = split_archive(path)
    if archive is None or not below:
        return path.exists()
    try:
        return bool(list_members(path))
    except OSError:
        return True  # a later read reports the error of the archive


def is_folder(path: Path) -> bool:
    """Return True if a path is a folder on the disk, a folder in an archive, or an archive."""
    if path.is_dir() or split_archive(path)[0] is None:
        return path.is_dir()
    try:
        return "" not in list_members(path)
    except OSError:
        return True


def list_members(path: Path) -> dict[str, int]:
    """Return the sizes in bytes of all files in an archive or in one of its folders, by name relative to `path`.

    If `path` is itself a file in an archive, the result has one entry, whose name is empty. Raise OSError if the
    archive is unreadable, or if a name in it leads outside of it.
    """
    archive, below = split_archive(path)
    if archive is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    with _as_os_error(archive):
        found = {info.filename: info.file_size for info in _open_archive(archive).infolist() if not info.is_dir()}
    # `unpack` would write a member named ../x outside its target folder.
    for name in found:
        if PurePosixPath(name).as_posix() != name or name.startswith("/") or ".." in name.split("/"):
            rule = f"the archive has a member {name!r}, which would be unpacked outside its folder"
            raise OSError(errno.EINVAL, rule, str(archive))
    if below in found:
        return {"": found[below]}
    beginning = f"{below}/" if below else ""
    return {name.removeprefix(beginning): size for name, size in sorted(found.items()) if name.startswith(beginning)}


def list_packed(archive: Path) -> dict[str, int]:
    """Return the size in bytes of each file in an archive, by file name. If an unpacked copy of a file exists, the file
    is excluded. The copy may be next to the archive, or in a folder with the name of the archive."""
    folders = archive.with_suffix(""), archive.parent
    found = list_members(archive).items()
    return {name: size for name, size in found if not any((folder / name).exists() for folder in folders)}


def unpack(path: Path, folder: Path) -> None:
    """Extract an archive, or a folder or file in it, into `folder`. Raise OSError if the archive is unreadable."""
    for name in list_members(path):
        unpacked = folder / name
        unpacked.parent.mkdir(parents=True, exist_ok=True)
        unpacked.write_bytes(read_regular(path / name))


@contextlib.contextmanager
def open_folder(path: Path) -> Iterator[Path]:
    """Yield a folder on the disk: `path` itself, or a temporary copy if `path` is an archive or lies in an archive.
    Raise UserError for an unreadable archive."""
    if split_archive(path)[0] is None:
        yield path
        return
    with tempfile.TemporaryDirectory() as unpacked:
        try:
            unpack(path, Path(unpacked))
        except OSError as error:
            raise UserError(str(path), error.strerror or str(error), "give a results folder") from error
        yield Path(unpacked)


def pack(members: Mapping[str, bytes]) -> bytes:
    """Return the bytes of a zip archive made of `members`, which maps file names to contents. Equal members give equal
    bytes."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for name, member in sorted(members.items()):
            info = zipfile.ZipInfo(name)  # with a fixed date, 1 January 1980
            # ZipInfo has no permissions by default, and tools would then unpack files without any.
            info.external_attr = (stat.S_IFREG | 0o644) << 16
            archive.writestr(info, member, zipfile.ZIP_DEFLATED, compresslevel=9)
    return content.getvalue()


def read_whole(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder by relative path. Links and hidden files are excluded.

    In the returned logs and other text files, access tokens are masked. On the disk, job logs may have unmasked tokens,
    because a scheduler writes these logs.
    """
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    visible = (path for path in paths if not any(part.startswith(".") for part in path.parts))
    contents = {path.as_posix(): read_regular(folder / path) for path in visible}
    # A binary file, recognised by a NUL byte, must keep its length. A network file system may put NUL bytes into a log.
    texts = {name for name, content in contents.items() if name.endswith(".log") or b"\0" not in content}
    return {name: mask_tokens(content) if name in texts else content for name, content in contents.items()}


def _open_archive(path: Path) -> zipfile.ZipFile:
    """Return an open archive. It is cached, so that it stays open for further reads until the file changes."""
    info = path.stat()
    # The process id is part of the key, because a forked process would share the position in the open file.
    return _open_version(str(path), info.st_dev, info.st_ino, info.st_ctime_ns, os.getpid())


@functools.lru_cache(maxsize=4)
def _open_version(path: str, *version: int) -> zipfile.ZipFile:
    return zipfile.ZipFile(open(path, "rb", opener=open_regular))


@contextlib.contextmanager
def _as_os_error(path: Path, rule: str = "is not a readable archive") -> Iterator[None]:
    """Convert errors of `zipfile` to OSError with the message `rule`. `zipfile` raises these errors for truncated,
    encrypted or unsupported archives. `path` is the archive, or the damaged file in it."""
    try:
        yield
    except _NO_ARCHIVE as error:
        raise OSError(errno.EINVAL, f"{rule} ({error})", str(path)) from error


_MOST_VALUES = 100_000
"""Maximum number of values in a YAML file after its aliases are expanded. A few lines of aliases could otherwise expand
to more than fits into memory."""


def read_yaml(path: Path, called: str) -> dict[str, Any]:
    """Return the keys and values of a YAML file, with interpolations unresolved. Raise UserError for a file without a
    mapping from strings to values; the error message begins with `called`, the user's name for the file."""
    from omegaconf import OmegaConf  # imported here, because reading results does not need it

    try:
        # Count the values before OmegaConf reads the file, which expands all aliases.
        tree = yaml.compose(path.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        if _count_values(tree, {}) > _MOST_VALUES:
            raise _build_error(path, called, f"has more than {_MOST_VALUES:,} values after expansion of aliases")
        plain = OmegaConf.to_container(OmegaConf.load(path)) if isinstance(tree, yaml.MappingNode) else None
    except UserError:
        raise
    except Exception as error:  # OmegaConf and yaml document no base class of their errors
        remedy = "give the path of a file" if isinstance(error, FileNotFoundError) else _CORRECT
        raise _build_error(path, called, format_reason(error), remedy) from error
    if not isinstance(plain, dict) or not all(isinstance(key, str) for key in plain):
        raise _build_error(path, called, "must be a mapping, with lines such as `key: value`")
    return {str(key): value for key, value in plain.items()}


def format_reason(error: Exception) -> str:
    """Return one line of text that states why a file is unreadable, from the error that reading it raised."""
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


_CORRECT = "correct the file"


def _build_error(path: Path, called: str, why: str, remedy: str = _CORRECT) -> UserError:
    shown = str(path) if str(path).isprintable() else repr(str(path))
    return UserError(called, f"{shown}: {why}", remedy)


def _count_values(node: yaml.Node | None, known: dict[int, int | None]) -> int:
    """Return the number of values in a YAML node. A node that is referenced several times counts at each place. Raise
    RecursionError for a node that contains itself. `known` caches counts by id of the node; None marks a node whose
    count is in progress."""
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
    """Return the folder of the configuration files. It is next to the packages in a checkout, and inside `bench` in a
    wheel."""
    # pyproject.toml puts conf/ into the package of a wheel.
    inside = Path(__file__).parents[1] / "conf"
    return inside if inside.is_dir() else Path(__file__).parents[2] / "conf"


def check_config_dir(config_dir: Path | None) -> None:
    """Raise UserError if the folder of a user's group files does not exist."""
    if config_dir and not config_dir.is_dir():
        remedy = "name a folder with subfolders like those of conf/"
        raise UserError(f"--config-dir {config_dir}", "no such folder", remedy)


def find_group_files(group: str, config_dir: Path | None = None) -> dict[str, Path]:
    """Return the files of a config group that ship with zeroscale and those in the user's `config_dir`, sorted by name.
    Raise UserError for a user's file with the name of a shipped file, or if `config_dir` does not exist."""
    check_config_dir(config_dir)
    files = {file.stem: file for file in (find_conf_folder() / group).glob("*.yaml")}
    for file in (config_dir / group).glob("*.yaml") if config_dir else ():
        if file.stem in files and not files[file.stem].samefile(file):
            rule = f"both {file} and a file that ships with zeroscale have this name"
            raise UserError(f"{group}={file.stem}", rule, "rename your file")
        files[file.stem] = file
    return dict(sorted(files.items()))


@functools.cache
def read_engine_preset(name: str) -> Mapping[str, Any]:
    """Return the options in the preset conf/engine/<name>.yaml. Return an empty mapping if conf/engine has no such
    file."""
    path = find_conf_folder() / "engine" / f"{name}.yaml"
    plain = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {option: value for option, value in plain.items() if option not in ("name", "backend")}


@functools.cache
def read_model_counts() -> Mapping[str, int | None]:
    """Return the published number of parameters of every model in conf/model, by file name without suffix; None if the
    file has no such number."""
    files = find_group_files("model").items()
    return {name: yaml.safe_load(path.read_text(encoding="utf-8")).get("parameters") for name, path in files}
