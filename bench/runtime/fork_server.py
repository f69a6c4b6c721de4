"""Server that forks ranks from a process in which all modules are already imported.

A job that measures many configurations uses this server, because a forked rank starts without imports. A supervisor
starts `python -m bench.runtime.fork_server DESCRIPTOR DEVICE ENGINES FAMILIES`, and requests ranks over the socket with
the file descriptor DESCRIPTOR. ENGINES and FAMILIES are comma-separated names of engines and of model families.

This process only imports modules. It must not use a device or a tensor. A tensor operation would start threads. Forked
children do not inherit threads, so every child would hang.
"""

import contextlib
import ctypes
import functools
import importlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from typing import Any

from bench.core import plugins
from bench.core.errors import UserError
from bench.core.processes import importing
from bench.engines.deepspeed.library import preload_deepspeed
from bench.runtime import worker

_PR_SET_PDEATHSIG = 1
# Signals that this process ignores, because a scheduler sends them to every process of a job. The supervisor ends this
# process instead.
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MESSAGE_BYTES = 16
_DESCRIPTORS = 16
_LIGHT: tuple[plugins.Kind[Any], ...] = (plugins.OBJECTIVE, plugins.DATA, plugins.ENGINE, plugins.FAMILY)


def main() -> None:
    """Import all modules, notify the supervisor, and fork a rank for each request until the supervisor closes the
    connection."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    preload(sys.argv[2], *(names.split(",") for names in sys.argv[3:]))
    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    connection.send(b"{}")
    while True:
        message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, _DESCRIPTORS)
        if not message:
            return
        with os.fdopen(descriptors.pop(0), "rb") as file:
            file.seek(0)
            request = json.load(file)
        rank = fork(functools.partial(_become_rank, request, descriptors), os.getppid())
        connection.send(json.dumps({"pid": rank}).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def preload(device: str, backends: Collection[str] | None = None, families: Collection[str] | None = None) -> None:
    """Import the modules of a rank on `device` ("cpu" or "cuda") for these engines (`backends`) and model families.

    If an argument is None, all engines or all families are imported. The arguments limit the imports, because some of
    the libraries take seconds to import.
    """
    os.environ["DS_ACCELERATOR"] = device
    # With this variable, torch looks for GPUs through the driver's library (NVML) and starts no CUDA context.
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    measuring = [f"bench.measure.{name}" for name in ("link", "memory", "loop", "observe")]
    # The garbage collector of a child does not touch frozen objects, so their memory pages stay shared.
    with importing():
        for kind in _LIGHT:
            list(plugins.list_usable(kind))
        for module in ("torch.distributed", "torch.nn.parallel", *measuring):
            importlib.import_module(module)
        builders: dict[plugins.Kind[Any], Collection[str] | None]
        builders = {plugins.ENGINE_BUILDER: backends, plugins.FAMILY_BUILDER: families}
        for builder, names in builders.items():
            for name in plugins.list_names(builder) if names is None else names:
                # A broken plug-in fails only the runs that use it.
                with contextlib.suppress(UserError):
                    plugins.load(builder, name)
        if backends is None or "deepspeed" in backends:
            preload_deepspeed()


def fork(run: Callable[[], object], parent: int, death_signal: int = signal.SIGKILL) -> int:
    """Call `run`, which never returns, in a new process that becomes a child of the process `parent`. Return the id of
    the new process.

    `parent` must be an ancestor of this process, and a subreaper (a process that adopts orphans). This process forks a
    helper process. The helper process forks the new process and ends immediately. So `parent` adopts the new process,
    and can wait for the end of the new process. When `parent` dies, the kernel sends `death_signal` to the new process;
    0 means no signal.
    """
    ours, theirs = os.pipe()
    middle = os.fork()
    if middle == 0:
        # Read before the second fork, because the child may be adopted before it can read its parent's id.
        itself = os.getpid()
        child = os.fork()
        if child == 0:
            try:
                while os.getppid() == itself:  # until it is adopted
                    time.sleep(0.001)
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, death_signal)
                # If the parent is now another process, `parent` died before the signal was set, and the kernel will
                # send no signal.
                if os.getppid() == parent or not death_signal:
                    run()
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        os.write(theirs, str(child).encode())
        os._exit(0)
    os.close(theirs)
    answer = os.read(ours, 32)
    os.close(ours)
    os.waitpid(middle, 0)
    return int(answer)


def _become_rank(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """Run the worker in this process, with the environment and file descriptors of a request."""
    import torch

    for number in _IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    os.setsid()
    output, *others = descriptors
    for target in (sys.stdout.fileno(), sys.stderr.fileno()):
        os.dup2(output, target)
    os.close(int(sys.argv[1]))
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ.update({name: str(number) for name, number in zip(request["descriptors"], others, strict=True)})
    sys.argv = ["bench.runtime.worker", *request["arguments"]]
    # Python and torch read these variables at their start, which was before this environment was set.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))
    worker.main()  # ends the process


if __name__ == "__main__":
    main()
