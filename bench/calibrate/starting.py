"""Start of a calibration's processes, on this machine or on every node of the current job."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench.calibrate import DOING, FAILURE, MEASURED, REQUEST, CalibrationRequest, CalibrationResult
from bench.core import plugins, store
from bench.core.errors import UserError
from bench.core.formatting import format_duration
from bench.core.job_environment import read_job
from bench.core.processes import build_module_command, interrupt_on_sigterm
from bench.core.scheduling import JobContext
from bench.core.terminal import Progress
from bench.measure.channel import LISTENER
from bench.runtime.node import build_rank_environment
from bench.runtime.process import install_handlers, start_child, start_process
from bench.runtime.transport import Rendezvous

_RANKS_POLL_S = 0.1
_STARTUP_S = 300.0  # maximum seconds between the start of the first node and of the other nodes


def run_node(folder: Path, number: int) -> bool:
    """Run all ranks of node `number` until they end. Return True if all of them succeeded. If one rank fails, the other
    ranks are killed. On an exception, for example from a signal handler, all ranks are killed."""
    request = CalibrationRequest.model_validate_json((folder / REQUEST).read_bytes())
    far = request.nodes > 1
    with contextlib.ExitStack() as stack:
        log = stack.enter_context((folder / f"ranks.{number}.log").open("wb"))
        listener = None
        if number == 0:
            address = ("" if far else "127.0.0.1", 0)
            listener = stack.enter_context(socket.create_server(address, backlog=request.world_size))
            host = request.network.address(socket.gethostname()) if far else "127.0.0.1"
            Rendezvous(host, listener.getsockname()[1], 0, "").write(folder)
        rendezvous = Rendezvous.wait(folder, _STARTUP_S)
        ranks: list[subprocess.Popen[bytes]] = []
        stack.callback(_kill_ranks, ranks)
        network, on_cpu = request.network if far else None, request.device == "cpu"
        common = build_rank_environment(request.device, request.ranks_per_node, network, rendezvous, hides_gpus=on_cpu)
        for local in range(request.ranks_per_node):
            rank = number * request.ranks_per_node + local
            environment = common | {"RANK": str(rank), "LOCAL_RANK": str(local)}
            first = {LISTENER: listener.fileno()} if listener and local == 0 else {}
            command = build_module_command("bench.calibrate.rank", str(folder))
            ranks.append(start_process(command, environment, first, log.fileno()))
        while True:  # until all ranks have ended, or one has failed: its peers would wait for it
            codes = [rank.poll() for rank in ranks]
            if any(codes) or None not in codes:
                return not any(codes)
            time.sleep(_RANKS_POLL_S)


def _kill_ranks(ranks: list[subprocess.Popen[bytes]]) -> None:
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()


_POLL_S = 0.5
_LOG = "nodes.log"
_NEARLY = 0.99  # largest progress that is shown while a calibration still runs


def measure(request: CalibrationRequest, parent: Path, follow: Callable[[Progress], None]) -> CalibrationResult:
    """Run a calibration and return its result. Meanwhile, call `follow` with the progress twice per second. Raise
    UserError with the reason of the first failed rank.

    The processes use a folder in `parent`, which all nodes must share; it is removed afterwards. Ctrl-C ends every
    process.
    """
    with _create_folder(parent, request) as folder, interrupt_on_sigterm():
        with _show_progress(folder, request.seconds, follow):
            ended_well = run_node(folder, 0) if request.nodes == 1 else _run_on_nodes(folder, request.nodes)
        if not ended_well or not (folder / MEASURED).exists():
            raise UserError(f"machine={request.machine.name}", f"the calibration failed ({_read_reason(folder)})")
        return CalibrationResult.model_validate_json((folder / MEASURED).read_bytes())


def _run_on_nodes(folder: Path, nodes: int) -> bool:
    """Run one process on each node. Return True if all succeeded. On an exception, end the processes and wait."""
    job = read_job(os.environ) or JobContext()
    launcher = plugins.load_queueing(job.system) if job.system in plugins.list_names(plugins.LAUNCHER) else None
    if launcher is None:
        rule = f"has {nodes} nodes, and no launcher can start a command on each of them"
        raise UserError(f"job {job.job_id}", rule, "start the command in a job of one node")
    command = launcher.spread(build_module_command("bench.calibrate.starting", str(folder)), nodes)
    with (folder / _LOG).open("wb") as log:
        try:
            # In its own session, because srun would ask for a second Ctrl-C.
            process = start_child(command, stdout=log, stderr=log)
        except FileNotFoundError as error:
            raise UserError(command[0], "not found inside this job", "start this outside any container") from error
        try:
            return process.wait() == 0
        except BaseException:
            process.terminate()
            process.wait()
            raise


@contextlib.contextmanager
def _create_folder(parent: Path, request: CalibrationRequest) -> Iterator[Path]:
    """Create the folder in which the processes exchange request and result. The folder is removed at the end of the
    context."""
    with contextlib.ExitStack() as stack:
        try:
            parent.mkdir(parents=True, exist_ok=True)
            folder = Path(tempfile.mkdtemp(prefix=".calibrating-", dir=parent)).resolve()
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            store.write_json(folder / REQUEST, request)
        except OSError as error:
            raise store.build_unwritable_error(parent, error) from error
        yield folder


@contextlib.contextmanager
def _show_progress(folder: Path, seconds: float, follow: Callable[[Progress], None]) -> Iterator[None]:
    """Call `follow` from a thread with the part of the calibration that is running, and the remaining time. The
    processes write the name of this part to a file in `folder`. `seconds` is the expected length of the calibration.
    The thread ends with this context."""
    ended = threading.Event()

    def report() -> None:
        begin = time.monotonic()
        while not ended.wait(_POLL_S):
            with contextlib.suppress(OSError):
                taken = time.monotonic() - begin
                left = f"about {format_duration(seconds - taken)} left" if taken < seconds else ""
                follow(Progress((folder / DOING).read_text(), min(taken / seconds, _NEARLY), left))

    thread = threading.Thread(target=report, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _read_reason(folder: Path) -> str:
    """Return the reason that the first failed rank wrote. If no rank wrote a reason, return the last line of the
    logs."""
    with contextlib.suppress(OSError):
        return (folder / FAILURE).read_text() or "no reason given"
    logs = [*sorted(folder.glob("ranks.*.log")), folder / _LOG]
    lines = [line for log in logs if log.exists() for line in log.read_text(errors="replace").splitlines() if line]
    return lines[-1] if lines else "its processes printed nothing"


if __name__ == "__main__":  # once per node of a job, started by its launcher
    install_handlers(sys.exit)  # raises an exception, so that the ranks are ended
    sys.exit(0 if run_node(Path(sys.argv[1]), (read_job(os.environ) or JobContext()).number) else 1)
