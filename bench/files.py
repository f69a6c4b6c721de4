"""Reading the files of a results folder: regular ones only, for a pipe would wait for ever, a device has no end, and a
link may lead to what the folder does not hold."""

import errno
import os
import stat
from pathlib import Path

RESULTS = Path("results/runs")
"""Folder of all studies' results, where no other is given."""


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
    """Return what a regular file holds; OSError for what is none, links included."""
    with open(path, "rb", buffering=0, opener=open_regular) as file:
        return file.read()
