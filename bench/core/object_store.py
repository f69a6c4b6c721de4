"""Objects (files of an object store) under a URL such as gs://bucket/folder, for machines that share no folder.

An object is written whole or not at all. `create` never replaces an object, so that only one of several processes can
claim a name. The store needs to support neither links nor renames. The library fsspec accesses gs:// (with gcsfs),
s3:// (with s3fs) and memory://. A file:// URL is a folder of this machine or of a network file system.
"""

import contextlib
import copy
import importlib.util
import logging
import os
import time
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import unquote, urlsplit

from bench.core import store
from bench.core.errors import UserError, make_printable
from bench.core.files import read_json
from bench.core.scheduling import SchedulerUnavailable

PATIENCE_S = 60.0
"""Seconds for which a call to a store that does not respond is repeated."""
_FIRST_RETRY_S, _LAST_RETRY_S = 0.5, 15.0
_REQUEST_S = 120.0  # for one request, the upload of 50 MB included
_LARGE_BYTES = 2**26  # larger files are sent in pieces instead of from memory
_PACKAGES = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "memory": "fsspec"}
_TIMES = ("mtime", "updated", "LastModified", "created")  # keys of fsspec's file systems, the most exact first
_NO_LOGIN = ("DefaultCredentialsError", "RefreshError", "NoCredentialsError")

_LOGGER = logging.getLogger(__name__)
_Result = TypeVar("_Result")


class StoreUnavailable(SchedulerUnavailable):
    """Error: an object store does not respond, so that its content is unknown."""


class ObjectInfo(NamedTuple):
    """Size of an object, and the time at which it was last written."""

    size: int
    modified_at: float  # seconds since the epoch


class ObjectStore:
    """Objects under one URL. If the store does not respond, calls are repeated for `patience_s` seconds.

    Methods raise StoreUnavailable if the store does not respond in this time, and UserError if it refuses access.
    """

    def __init__(self, url: str, patience_s: float = PATIENCE_S) -> None:
        self.url, self._patience_s = url.rstrip("/"), patience_s
        self._backend = _open_backend(self.url)
        self.give_up_at: float | None = None
        """Time until which calls are repeated, in seconds since the epoch. If not None, it replaces `patience_s`."""

    def without_patience(self) -> "ObjectStore":
        """Return a copy of this `ObjectStore` that does not repeat failed calls."""
        single = copy.copy(self)
        single._patience_s, single.give_up_at = 0.0, None
        return single

    def create(self, name: str, content: bytes) -> bool:
        """Write an object unless it exists. Return False if an object with this name and other content exists.

        An existing object with equal content counts as written by this call, because the call may be the repetition of
        a call whose response was lost. Two processes must therefore never write equal contents. A random word in the
        content is enough.
        """
        if self._write(lambda: self._backend.create(name, content)):
            return True
        # A client may repeat a call whose answer was lost. The repetition finds the object of the first call.
        return self.read(name) == content

    def write(self, name: str, content: bytes) -> None:
        """Write an object, or replace it."""
        self._write(lambda: self._backend.write(name, content))

    def put(self, path: Path, name: str) -> None:
        """Write an object with the content of a file, or replace it."""
        if path.stat().st_size > _LARGE_BYTES:
            self._write(lambda: self._backend.put(path, name))
        else:
            self.write(name, path.read_bytes())

    def read(self, name: str) -> bytes:
        """Return the content of an object. Raise FileNotFoundError if it does not exist."""
        return self._repeat(lambda: self._backend.read(name))

    def stat(self, name: str) -> ObjectInfo:
        """Return an object's size and the time of its last change. Raise FileNotFoundError if it does not exist."""
        return self._repeat(lambda: self._backend.stat(name))

    def remove(self, name: str) -> None:
        """Delete an object if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._repeat(lambda: self._backend.remove(name))

    def list(self, folder: str = "") -> dict[str, ObjectInfo]:
        """Return all objects below a folder, by name relative to the store's URL. Hidden objects, whose name or folder
        begins with a dot, are left out."""
        try:
            found = self._repeat(lambda: self._backend.list(folder.strip("/")))
        except FileNotFoundError:  # nothing was written there yet
            return {}
        return {name: info for name, info in found.items() if not any(part[:1] == "." for part in name.split("/"))}

    def _write(self, call: Callable[[], _Result]) -> _Result:
        try:
            return self._repeat(call)
        except FileNotFoundError as error:
            remedy = "create the bucket, or use the URL of another bucket"
            raise UserError(self.url, "no such bucket", remedy) from error

    def _repeat(self, call: Callable[[], _Result]) -> _Result:
        """Return the result of a call. Repeat the call while the store does not respond."""
        patience_s = self._patience_s if self.give_up_at is None else self.give_up_at - time.time()
        until, pause_s = time.monotonic() + patience_s, _FIRST_RETRY_S
        while True:
            try:
                return call()
            except (FileNotFoundError, UserError, TypeError, AttributeError):
                raise
            except Exception as error:  # every file system of fsspec has its own exceptions
                if refusal := _explain_refusal(error):
                    raise UserError(self.url, *refusal) from error
                if time.monotonic() + pause_s > until:
                    rule = f"does not respond ({_describe(error)})"
                    raise StoreUnavailable(self.url, rule, "check the network, and repeat the command") from error
                told = _describe(error)
            _LOGGER.warning("%s: does not respond (%s); next try in %g s; stop with Ctrl-C", self.url, told, pause_s)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_RETRY_S)


def _explain_refusal(error: Exception) -> tuple[str, str] | None:
    """Return the reason and the remedy for an error message if the store has refused the request. A refused request is
    not repeated. Return None for any other error."""
    code = str(getattr(error, "code", "") or getattr(error, "status", ""))
    if (type(error).__name__ in _NO_LOGIN and not getattr(error, "retryable", False)) or code == "401":
        remedy = "log in, for example with `gcloud auth application-default login`"
        return f"no valid credentials ({_describe(error)})", remedy
    # gcsfs raises a plain OSError for status 403.
    if isinstance(error, PermissionError) or code == "403" or str(error).startswith("Forbidden"):
        remedy = "give this account read and write access, or use another account"
        return f"access is denied ({_describe(error)})", remedy
    if isinstance(error, ValueError) or code == "400":
        return f"the store refuses the request ({_describe(error)})", "check the URL"
    return None


def _describe(error: Exception) -> str:
    first_line, *_ = make_printable(str(error)).strip().splitlines() or [""]
    return f"{type(error).__name__}: {first_line[:200]}" if first_line else type(error).__name__


def _open_backend(url: str) -> "_FolderBackend | _FsspecBackend":
    """Return the backend that accesses the objects under a URL. Raise UserError for a URL that is not supported
    here."""
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.path.startswith("/") and not parts.netloc:
        return _FolderBackend(Path(unquote(parts.path)))
    if parts.scheme not in _PACKAGES or not parts.netloc:
        remedy = "use the URL of a bucket, such as gs://bucket/zeroscale, or of a folder, file:///folder"
        raise UserError(url, "is not the URL of an object store", remedy)
    package = _PACKAGES[parts.scheme]
    if missing := next((name for name in ("fsspec", package) if importlib.util.find_spec(name) is None), None):
        rule = f"the package {missing} for this object store is not installed"
        extra = "'zeroscale[vertex]'" if package == "gcsfs" else package
        raise UserError(url, rule, f"pip install {extra}")
    if package == "gcsfs":
        _check_credentials(os.environ)
    return _FsspecBackend(url)


_LOGIN_FILE = "GOOGLE_APPLICATION_CREDENTIALS"


def _check_credentials(variables: Mapping[str, str]) -> None:
    """Raise UserError if the user's file with Google credentials cannot be used. Without this check, Google's client
    would search for other credentials for a minute."""
    if not (path := variables.get(_LOGIN_FILE)):
        return
    found = read_json(Path(path)) if Path(path).is_file() else None
    if not found or "type" not in found:
        rule = "has no credentials" if Path(path).is_file() else "no such file"
        remedy = "correct the path, or unset it and log in with `gcloud auth application-default login`"
        raise UserError(f"{_LOGIN_FILE}={path}", rule, remedy)


class _FolderBackend:
    """Objects as files of a folder. Hard links and renames replace the conditional writes of an object store.

    `ObjectStore` calls these methods. The names of objects are relative to the URL of the store. For an object that
    does not exist, `read`, `stat` and `remove` raise FileNotFoundError.
    """

    def __init__(self, root: Path) -> None:
        self._root = root

    def create(self, name: str, content: bytes) -> bool:
        return store.write_reserved(self._make_parent(name), content)

    def write(self, name: str, content: bytes) -> None:
        store.write_atomically(self._make_parent(name), content)

    def put(self, path: Path, name: str) -> None:
        self.write(name, path.read_bytes())

    def read(self, name: str) -> bytes:
        return (self._root / name).read_bytes()

    def remove(self, name: str) -> None:
        (self._root / name).unlink()

    def stat(self, name: str) -> ObjectInfo:
        found = (self._root / name).stat()
        return ObjectInfo(found.st_size, found.st_mtime)

    def list(self, folder: str) -> dict[str, ObjectInfo]:
        found: dict[str, ObjectInfo] = {}
        self._root.stat()  # an error, unlike an empty folder, is not an empty result
        for path in (self._root / folder).rglob("*"):
            name = path.relative_to(self._root).as_posix()
            try:
                if path.is_file():
                    found[name] = self.stat(name)
            except FileNotFoundError:
                continue  # a temporary file, or an object that was removed just now
        return found

    def _make_parent(self, name: str) -> Path:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


class _FsspecBackend:
    """Objects in a file system of fsspec in which `pipe_file(…, mode="create")` is atomic. The methods are those of
    `_FolderBackend`."""

    def __init__(self, url: str) -> None:
        from fsspec.core import url_to_fs

        # gcsfs logs every failed call with its traceback, and waits without a limit for a lost connection.
        logging.getLogger("gcsfs").addHandler(logging.NullHandler())
        is_google = url.startswith(("gs:", "gcs:"))
        more = {"requests_timeout": _REQUEST_S} if is_google else {}
        # One request per object: between two requests, the object may be replaced by a longer one.
        self._reading = {"concurrency": 1} if is_google else {}
        # With caches, objects that other processes write stay unseen.
        self._fs, self._root = url_to_fs(url, use_listings_cache=False, skip_instance_cache=True, **more)
        self._root = self._root.rstrip("/")

    def create(self, name: str, content: bytes) -> bool:
        try:
            self._fs.pipe_file(self._path(name), content, mode="create")
        except FileExistsError:
            return False
        return True

    def write(self, name: str, content: bytes) -> None:
        self._fs.pipe_file(self._path(name), content)

    def put(self, path: Path, name: str) -> None:
        self._fs.put_file(str(path), self._path(name))

    def read(self, name: str) -> bytes:
        return bytes(self._fs.cat_file(self._path(name), **self._reading))

    def remove(self, name: str) -> None:
        self._fs.rm_file(self._path(name))

    def stat(self, name: str) -> ObjectInfo:
        return _read_info(self._fs.info(self._path(name)))

    def list(self, folder: str) -> dict[str, ObjectInfo]:
        found = self._fs.find(self._path(folder), detail=True)
        start = len(self._root) + 1
        return {path[start:]: _read_info(info) for path, info in found.items() if info["type"] == "file"}

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")


def _read_info(info: dict[str, Any]) -> ObjectInfo:
    """Return the size and the time of the last change of an object, from fsspec's description of the object."""
    value = next((info[key] for key in _TIMES if info.get(key)), 0.0)
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    return ObjectInfo(int(info["size"]), value.timestamp() if isinstance(value, datetime) else float(value))
