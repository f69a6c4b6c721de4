"""Files as one archive: equal files give equal bytes, whoever packs them, when and where."""

import gzip
import hashlib
import io
import tarfile
from collections.abc import Mapping
from pathlib import PurePosixPath

from bench.errors import UserError

MANIFEST = "manifest.csv"


def pack_archive(folder: str, files: Mapping[str, bytes]) -> bytes:
    """Return `files` by path, and their manifest, as a tar.gz that unpacks into one `folder`."""
    target = io.BytesIO()
    with (
        gzip.GzipFile("", "wb", fileobj=target, mtime=0) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.GNU_FORMAT) as archive,
    ):
        for path, content in sorted({**files, MANIFEST: render_manifest(files)}.items()):
            if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
                raise UserError(path, "leads out of the bundle", "leave out the record that names it")
            entry = tarfile.TarInfo(f"{folder}/{path}")
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return target.getvalue()


def render_manifest(files: Mapping[str, bytes]) -> bytes:
    """Return path, size and SHA-256 of each file as CSV."""
    rows = [
        f"{_quote_path(path)},{len(files[path])},{hashlib.sha256(files[path]).hexdigest()}" for path in sorted(files)
    ]
    return "\n".join(["path,bytes,sha256", *rows, ""]).encode()


def _quote_path(path: str) -> str:
    return '"' + path.replace('"', '""') + '"'
