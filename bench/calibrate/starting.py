"""Start a calibration's processes, here or on every node of the job around this process."""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from bench import job_context, store
from bench.calibrate import node
from bench.calibrate.request import DOING, FAILURE, MEASURED, REQUEST, CalibrationRequest, CalibrationResult
from bench.errors import UserError
from bench.formatting import duration
from bench.processes import build_module_command
from bench.runtime.process import set_parent_death_signal
from bench.terminal import Progress

_POLL_S = 0.5
_LOG = "nodes.log"
_NEARLY = 0.99  # of a calibration that has taken as long as it may, and goes on


def measure(request: CalibrationRequest, parent: Path, follow: Callable[[Progress], None]) -> CalibrationResult:
    """Run a calibration and return what came out. Its folder is made in `parent`, which all nodes must see, and removed
    again. Raises UserError with the reason of the first rank that failed. A Ctrl-C ends every process."""
    with _create_folder(parent, request) as folder, _raise_interrupt_on_sigterm():
        with _show_progress(folder, request.seconds, follow):
            ended_well = node.run(folder, 0) if request.nodes == 1 else _run_on_nodes(folder, request.nodes)
        if not ended_well or not (folder / MEASURED).exists():
            raise UserError(f"machine={request.machine.name}", f"the calibration failed ({_read_reason(folder)})")
        return CalibrationResult.model_validate_json((folder / MEASURED).read_bytes())


def _run_on_nodes(folder: Path, nodes: int) -> bool:
    """Run one process per node; return whether all ended well. What ends this ends them, and waits until they are."""
    launcher = job_context.find_job(os.environ).launcher
    assert launcher, "several nodes are those of a job"
    command = launcher.spread(build_module_command("bench.calibrate", str(folder)), nodes)
    with (folder / _LOG).open("wb") as log:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # a terminal's Ctrl-C comes here alone: srun, say, asks for a second one
                preexec_fn=lambda: set_parent_death_signal(signal.SIGTERM),
            )
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
    """Make the folder through which the processes exchange what is asked and measured, and remove it at the end."""
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
def _raise_interrupt_on_sigterm() -> Iterator[None]:
    """Take a request to end for a Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _show_progress(folder: Path, seconds: float, follow: Callable[[Progress], None]) -> Iterator[None]:
    """Tell what is under way and what is left of the `seconds`, from a thread of its own, as long as this lasts."""
    ended = threading.Event()

    def tell() -> None:
        begin = time.monotonic()
        while not ended.wait(_POLL_S):
            with contextlib.suppress(OSError):
                taken = time.monotonic() - begin
                left = f"about {duration(seconds - taken)} left" if taken < seconds else ""
                follow(Progress((folder / DOING).read_text(), min(taken / seconds, _NEARLY), left))

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _read_reason(folder: Path) -> str:
    """Return what the first rank that failed said, or else the last that anybody did."""
    with contextlib.suppress(OSError):
        return (folder / FAILURE).read_text() or "no reason given"
    logs = [*sorted(folder.glob("ranks.*.log")), folder / _LOG]
    lines = [line for log in logs if log.exists() for line in log.read_text(errors="replace").splitlines() if line]
    return lines[-1] if lines else "its processes ended without a word"
