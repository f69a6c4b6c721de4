"""Ranks forked from a process that has done their imports: a point of a packed job costs little beside its steps.

`python -m bench.runtime.fork_server DESCRIPTOR DEVICE ENGINES FAMILIES`, started by a supervisor, which asks for ranks
over the socket of that number; the engines and model families that will be used are named, divided by commas. This
process imports, and touches neither a device nor a tensor: one tensor operation here would start threads that no child
inherits, and every child would hang.
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
# A scheduler signals every process of a job. The supervisor ends this one when it is done with it, by hanging up.
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MESSAGE_BYTES = 16
_DESCRIPTORS = 16
_LIGHT: tuple[plugins.Kind[Any], ...] = (plugins.OBJECTIVE, plugins.DATA, plugins.ENGINE, plugins.FAMILY)


def main() -> None:
    """Import, say so, and fork a rank for every request until the supervisor hangs up."""
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
    """Import whatever a rank will; `device` is "cpu" or "cuda", without `backends` and `families` it is all there are:
    the libraries of some take seconds."""
    os.environ["DS_ACCELERATOR"] = device
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asks the driver's library and starts no CUDA context
    measuring = [f"bench.measure.{name}" for name in ("link", "memory", "device", "loop", "observe")]
    with importing():  # nor does a page have to be copied only because a child's collector looks at it
        for kind in _LIGHT:
            list(plugins.list_usable(kind))
        for name in ("torch.distributed", "torch.nn.parallel", *measuring):
            importlib.import_module(name)
        _load_builders(plugins.ENGINE_BUILDER, backends)
        _load_builders(plugins.FAMILY_BUILDER, families)
        if backends is None or "deepspeed" in backends:
            preload_deepspeed()


def _load_builders(kind: plugins.Kind[Any], names: Collection[str] | None) -> None:
    """Import what builds models or engines; one that is broken fails the runs that ask for it, not all."""
    for name in plugins.list_names(kind) if names is None else names:
        with contextlib.suppress(UserError):
            plugins.load(kind, name)


def fork(run: Callable[[], object], parent: int, death_signal: int = signal.SIGKILL) -> int:
    """Start `run`, which never returns, in a new child of `parent` and return its process id. `parent` adopts orphans:
    the process is forked twice, so that it becomes a child of `parent` and can be waited for there. The kernel sends it
    `death_signal` when `parent` dies; 0 for none."""
    ours, theirs = os.pipe()
    middle = os.fork()
    if middle == 0:
        itself = os.getpid()  # asked for here: the child may be adopted before it could ask who its parent is
        child = os.fork()
        if child == 0:
            try:
                while os.getppid() == itself:  # until it is adopted
                    time.sleep(0.001)
                ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, death_signal)
                if os.getppid() == parent or not death_signal:  # else it died before it could take this process along
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
    """Run the worker in this process as if it had been started with its environment and descriptors."""
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
    _apply_environment()
    worker.main()  # which ends the process


def _apply_environment() -> None:
    """Do what libraries would have read from the environment while they were imported."""
    import torch

    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if threads := os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(int(threads))


if __name__ == "__main__":
    main()
