"""One local run of a user at a time on a machine: two at once would measure each other."""

import contextlib
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

from bench.files import get_cache_folder

_LOCK_POLL_S = 0.3


@contextlib.contextmanager
def alone(follow: Callable[[str], None]) -> Iterator[None]:
    """Hold this machine's lock inside the block, after whoever has it now. `follow` hears what is waited for; standard
    error too, once. The system takes the lock back from a process that dies. Where no file can be locked, there is no
    lock."""
    try:
        file = _opened(path(os.environ))
    except OSError as error:
        print(f"zeroscale: other local runs are not waited for: {error}", file=sys.stderr)
        yield
        return
    with file:
        _wait(file, follow)
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "command": " ".join(sys.argv)[:200], "since": time.time()}))
        file.flush()
        yield
        file.truncate(0)


def path(variables: Mapping[str, str]) -> Path:
    """Return the file that is locked: this host's, in the folder of the user's session or, without one, of its caches,
    which several hosts may share."""
    session = Path(variables.get("XDG_RUNTIME_DIR", ""))
    folder = session / "zeroscale" if session.is_absolute() and session.is_dir() else get_cache_folder(variables)
    return folder / f"local-{socket.gethostname()}.lock"


def _opened(lock: Path) -> IO[str]:
    lock.parent.mkdir(parents=True, exist_ok=True)
    return os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+")


def _wait(file: IO[str], follow: Callable[[str], None]) -> None:
    said = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waiting = f"waiting for {_holder(file)}, which measures on this machine; launcher.lock=false does not wait"
        follow(waiting)
        if not said:
            print(f"zeroscale: {waiting}", file=sys.stderr, flush=True)
            said = True
        time.sleep(_LOCK_POLL_S)


def _holder(file: IO[str]) -> str:
    """Return who has the lock, as far as it has said so."""
    try:
        file.seek(0)
        holder = json.loads(file.read())
        since_s = time.time() - float(holder["since"])
        return f"process {int(holder['pid'])} ({holder['command']}), since {since_s:.0f} s ago"
    except (OSError, ValueError, KeyError, TypeError):
        return "another run"
