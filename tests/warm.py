"""Fast start of processes in tests: they are forked from a server that has already done their imports.

A rank spends nearly all of its processor time on imports of torch and DeepSpeed. This module has its own `Popen`, which
avoids the imports. If a command runs a module of `bench` or a script of the tests, `Popen` forks the new process from a
server with these imports done. A forked process uses the same `Popen`. So if it starts supervisors or ranks, they are
forked, too.

Any other command is started as usual by `subprocess.Popen`. This also holds for a command whose environment changes
what is imported (`PYTHONPATH`, `LD_PRELOAD`).
"""

import atexit
import contextlib
import ctypes
import fcntl
import functools
import importlib
import io
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

TESTS = Path(__file__).resolve().parent
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ENDS_WITH_PARENT = {"bench.runtime": signal.SIGTERM, "bench.runtime.worker": signal.SIGKILL}
"""Modules whose process must end with its parent, and the signal that the process receives when its parent dies.
Normally a `preexec_fn` requests this signal; in a forked process, the fork server requests it."""
_STARTING = ("bench.cli", "bench.runtime", "bench.sweep.allocation")
"""Modules that start other processes. Each gets its own fork server, so that the forked processes become its
children."""
_IMPORTING = ("PYTHONSAFEPATH", "LD_PRELOAD", "PYTHONHASHSEED", "PYTHONWARNINGS")
_MESSAGE_BYTES, _DESCRIPTORS, _ABOVE = 64, 32, 512
_libc = ctypes.CDLL(None)
_RealPopen = subprocess.Popen
_environment = dict(os.environ)  # environment for servers, independent of the test that starts them

_servers: dict[str | None, "Server"] = {}
"""Fork servers of this process, by their value of PYTHONPATH."""
_paths: set[str | None] = {os.environ.get("PYTHONPATH")}
"""Values of PYTHONPATH for which a fork server may be started."""


class Server:
    """Connection to a fork server: a process that forks on request. Each forked process becomes a child of the
    process that holds this object."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid, self._connection, self._lock = pid, connection, threading.Lock()
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1)

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Make the fork server run `request` in a new process, and return its process id. `request` names a module or
        script with its arguments and environment. The new process gets copies of the open file descriptors."""
        with self._lock, os.fdopen(os.memfd_create("request"), "wb") as file:
            file.write(json.dumps(request).encode())
            file.flush()
            socket.send_fds(self._connection, [b"{}"], [file.fileno(), *descriptors])
            return int(self._connection.recv(_MESSAGE_BYTES))


class Popen(subprocess.Popen[Any]):
    """A `subprocess.Popen` that forks from a fork server if the command permits it, and otherwise starts the command
    as usual."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any,
                       env: Any, startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int,
                       c2pread: int, c2pwrite: int, errread: int, errwrite: int, *more: Any) -> None:  # fmt: skip
        environment = dict(os.environ if env is None else env)
        ran = None if shell or executable else _find_module(args, environment)
        if preexec_fn and ran and ran.get("module") not in _ENDS_WITH_PARENT:
            ran = None  # a function cannot be sent to the server
        if ran is None:
            named = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell)
            ends = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
            super()._execute_child(*named, *ends, *more)  # type: ignore[misc]
            return
        standard = [own if end == -1 else end for own, end in enumerate((p2cread, c2pwrite, errwrite))]
        own_session = bool(more[-2])  # restore_signals, gid, gids, uid, umask, start_new_session, process_group
        request = {
            **ran, "environment": {os.fsdecode(k): os.fsdecode(v) for k, v in environment.items()},
            "folder": os.fspath(cwd or Path.cwd()), "targets": [0, 1, 2, *pass_fds], "session": own_session,
        }  # fmt: skip
        self.pid = _find_server(environment.get("PYTHONPATH")).fork(request, [*standard, *pass_fds])
        self._child_created = True
        for child, parent in ((p2cread, p2cwrite), (c2pwrite, c2pread), (errwrite, errread)):
            if child not in (-1, parent) and parent != -1:
                os.close(child)
        if getattr(self, "_devnull", None) is not None:
            os.close(self._devnull)  # type: ignore[has-type]


def install() -> None:
    """Replace `subprocess.Popen` in this process by the version that forks from a fork server."""
    subprocess.Popen = Popen  # type: ignore[misc]


@contextlib.contextmanager
def cold() -> Iterator[None]:
    """Start every command within this context in a fresh interpreter."""
    before, subprocess.Popen = subprocess.Popen, _RealPopen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = before  # type: ignore[misc]


@contextlib.contextmanager
def orphaning() -> Iterator[None]:
    """Within this context, the operating system (its init process) adopts orphaned processes, which is the usual
    behaviour. Outside of this context, orphans of a fork server are adopted by the process that started the server."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0)
    try:
        yield
    finally:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(bool(_servers)))


def serve(path: str) -> None:
    """Allow commands whose PYTHONPATH is `path` to be forked from a fork server. All other commands are started in new
    interpreters, because the start of a fork server for their PYTHONPATH would take six seconds."""
    _paths.add(path)


def _find_module(args: Any, environment: dict[str, str]) -> dict[str, Any] | None:
    """Return the module or script that a command runs, with its arguments. Return None if the command cannot be forked,
    so that it must be started as usual."""
    if isinstance(args, str | bytes | os.PathLike):
        return None
    python, *words = (os.fspath(word) for word in args)
    if python != sys.executable or environment.get("PYTHONPATH") not in _paths:
        return None
    if any(environment.get(name) != os.environ.get(name) for name in _IMPORTING):
        return None
    safe = words[:1] == ["-P"]
    words = words[safe:]
    if len(words) > 1 and words[0] == "-m" and words[1].startswith("bench."):
        return {"module": words[1], "arguments": words[2:], "safe": safe}
    if words and words[0].endswith(".py") and Path(words[0]).resolve().is_relative_to(TESTS):
        return {"script": words[0], "arguments": words[1:]}
    return None


def _find_server(path: str | None) -> Server:
    """Return this process's fork server for a PYTHONPATH. The first call starts the server."""
    if path not in _servers:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        own = {name: value for name, value in _environment.items() if name != "PYTHONPATH"}
        with theirs:
            started = _RealPopen(
                [sys.executable, "-P", str(Path(__file__).resolve()), str(theirs.fileno())],
                env=own | {"OMP_NUM_THREADS": "1"} | ({} if path is None else {"PYTHONPATH": path}),
                pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        ours.recv(_MESSAGE_BYTES)
        _servers[path] = Server(started.pid, ours)
    return _servers[path]


def main() -> None:
    """Run a fork server: do the imports, report readiness, and fork a process per request until the connection is
    closed."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    from bench.runtime import fork_server

    fork_server.preload("cpu")
    for name in ("bench.cli.run", "bench.cli.sweep", "bench.sweep.allocation.leader", "bench.runtime.coordinator"):
        importlib.import_module(name)
    connection.send(b"ready")
    _serve(connection)


def _serve(connection: socket.socket) -> None:
    from bench.runtime import fork_server

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    asker = os.getppid()
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, _DESCRIPTORS)
        if not message:
            os._exit(0)
        with os.fdopen(descriptors.pop(0), "rb") as file:
            file.seek(0)
            request = json.load(file)
        become = functools.partial(_become, request, descriptors)
        death_signal = _ENDS_WITH_PARENT.get(request.get("module"), 0)
        connection.send(str(fork_server.fork(become, asker, death_signal)).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _become(request: dict[str, Any], descriptors: Sequence[int]) -> NoReturn:
    """Turn a forked process into the requested module or script, as a fresh interpreter would run it, and exit."""
    module = request.get("module", "")
    if request["session"]:
        os.setsid()
    _take_descriptors(descriptors, request["targets"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _open_streams()
    install()
    path = os.environ.get("PYTHONPATH")
    _servers.clear()
    _paths.clear()
    _paths.add(path)
    if module in _STARTING:
        _servers[path] = _fork_server()
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))
    _end(_run(request))


def _take_descriptors(descriptors: Sequence[int], targets: Sequence[int]) -> None:
    """Move open file descriptors to the numbers in `targets`, and close all other descriptors."""
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, _ABOVE) for descriptor in descriptors]
    os.closerange(0, _ABOVE)
    for descriptor, target in zip(high, targets, strict=True):
        os.dup2(descriptor, target)
    os.closerange(_ABOVE, _ABOVE + 2 * len(high) + 1)


def _open_streams() -> None:
    at_once = bool(os.environ.get("PYTHONUNBUFFERED"))
    sys.stdin = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))
    for number, name in ((1, "stdout"), (2, "stderr")):
        raw = io.BufferedWriter(io.FileIO(number, "w", closefd=False))
        by_line = number == 2 or os.isatty(number)
        stream = io.TextIOWrapper(raw, "utf-8", "backslashreplace" if number == 2 else "strict",
                                  line_buffering=by_line, write_through=at_once)  # fmt: skip
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _fork_server() -> Server:
    """Fork a fork server from this process, which must still have a single thread. The server is killed when this
    process ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        ours.close()
        os.setsid()
        null = os.open(os.devnull, os.O_RDWR)
        for number in (0, 1, 2):  # otherwise the server would keep its parent's pipes open
            os.dup2(null, number)
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            _serve(theirs)
        os._exit(0)
    theirs.close()
    return Server(pid, ours)


def _run(request: dict[str, Any]) -> int:
    """Run the requested module or script, and return its exit code. If SIGINT interrupts the module or script, return
    the negative number of SIGINT."""
    module, script = request.get("module"), request.get("script")
    sys.argv = [script or str(module), *request["arguments"]]
    if not request.get("safe"):
        sys.path.insert(0, str(Path.cwd()) if module else str(Path(str(script)).resolve().parent))
    try:
        if module:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as ended:
        if ended.code is None or isinstance(ended.code, int):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(code: int) -> NoReturn:
    """Exit like an interpreter does: join threads, run exit functions and flush streams."""
    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    sys.path.append(str(TESTS.parent))
    from tests import warm  # import by this name, so that all processes share one module

    warm.main()
