"""One attempt at a point on this machine. It waits for other local runs, starts a supervisor, and follows the run to
its end."""

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

from bench import launchers
from bench.core import store
from bench.core.files import get_cache_folder
from bench.core.formatting import format_duration
from bench.core.processes import build_module_command
from bench.core.record import Outcome, RunRecord
from bench.core.scheduling import LaunchPlan, Work
from bench.core.spec import MeasureSpec, RunSpec
from bench.core.terminal import Progress
from bench.runtime.outcome import build_heartbeat
from bench.runtime.process import set_parent_death_signal
from bench.sweep import snapshot
from bench.sweep.definition import RequestedRun
from bench.sweep.snapshot import find_rival_attempt

_LOCK_POLL_S = 0.3
_POLL_S = 0.1
_NEARLY = 0.99  # largest share shown for a run that takes longer than expected


@contextlib.contextmanager
def alone(follow: Callable[[str], None]) -> Iterator[None]:
    """Hold this machine's lock for local runs inside the block.

    While another process holds the lock, `follow` is called with a text about that process. The text is printed once to
    standard error. If a process dies, the kernel releases its lock. If the lock file cannot be opened, the block runs
    without a lock.
    """
    try:
        lock = path(os.environ)
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+")
    except OSError as error:
        print(f"zeroscale: no lock against other local runs: {error}", file=sys.stderr)
        yield
        return
    with file:
        _wait(file, follow)
        # The file is opened for appending: after truncation, it contains only the entry of this process.
        file.truncate(0)
        file.write(json.dumps({"pid": os.getpid(), "since": time.time()}))
        file.flush()
        yield
        file.truncate(0)


def path(variables: Mapping[str, str]) -> Path:
    """Return the path of this host's lock file. It is in the folder of the user's session, or else in the user's cache
    folder.

    The file name contains the host name, since several hosts may share the cache folder.
    """
    session = Path(variables.get("XDG_RUNTIME_DIR", ""))
    folder = session / "zeroscale" if session.is_absolute() and session.is_dir() else get_cache_folder(variables)
    return folder / f"local-{socket.gethostname()}.lock"


def is_held(variables: Mapping[str, str]) -> bool:
    """Return whether another process holds this machine's lock for local runs."""
    with contextlib.suppress(FileNotFoundError, PermissionError), path(variables).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _wait(file: IO[str], follow: Callable[[str], None]) -> None:
    """Wait until the lock is free, and take it."""
    printed = False
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waiting = f"{_describe_holder(file)}; waiting. To start anyway: launcher.lock=false"
        follow(waiting)
        if not printed:
            print(f"zeroscale: {waiting}", file=sys.stderr, flush=True)
            printed = True
        time.sleep(_LOCK_POLL_S)


def _describe_holder(file: IO[str]) -> str:
    """Return in words which process holds the lock and for how long.

    A process writes these facts into the file a moment after it has taken the lock, so they may be missing.
    """
    try:
        file.seek(0)
        holder = json.loads(file.read())
        since_s = time.time() - float(holder["since"])
        return f"Another zeroscale run (pid {int(holder['pid'])}) has been measuring for {since_s:.0f} s"
    except (OSError, ValueError, KeyError, TypeError):
        return "Another zeroscale run is measuring"


class AttemptWatch:
    """Progress of one attempt. The step number is read from its heartbeat, and the longest duration follows from its
    protocol."""

    def __init__(self, folder: Path, protocol: MeasureSpec) -> None:
        self._folder, self._protocol = folder, protocol
        self._first: tuple[int, float] | None = None  # the first step number that was seen, and the time in seconds
        self._share: float | None = None

    def look(self) -> Progress:
        """Return the current phase of the attempt, and at most how much time is left."""
        beat = snapshot.read_heartbeat(self._folder)
        if not beat or not beat.ranks:
            return Progress("starting")
        behind = min(beat.ranks, key=lambda rank: rank.step)
        if behind.step < 0:  # the loop of steps has not begun, or has ended
            return Progress(behind.phase, self._share)
        return self.of_step(behind.step, time.monotonic(), behind.phase)

    def of_step(self, step: int, now_s: float, phase: str) -> Progress:
        """Return the progress of a run whose slowest rank is at `step`, as a share of the longest warm-up and window
        allowed."""
        at, since_s = self._first = self._first or (step, now_s)
        what = f"{phase} {step}"
        if step == at:
            return Progress(what)
        step_s = (now_s - since_s) / (step - at)
        protocol = self._protocol
        # A window lasts until it has its least steps and its seconds, and at most `max_s`.
        window_s = min(protocol.max_s, max(protocol.min_steps * step_s, protocol.window_s))
        most_s = max(protocol.warmup_steps * step_s, protocol.gpu_warmup_s) + window_s
        left_s = max(0.0, most_s - step * step_s)
        self._share = min(1 - left_s / most_s, _NEARLY)
        return Progress(what, self._share, f"at most {format_duration(left_s)} left")


class MeasuredRun(NamedTuple):
    """Folder and record of an attempt that has ended."""

    folder: Path
    record: RunRecord


class SweepSupervisor:
    """One supervisor process for all attempts of a local sweep. The first attempt starts it.

    The ranks are forked from a process that imports torch and the engines once, so an attempt takes little longer than
    its steps. The class has the methods `submit`, `poll` and `cancel` of a launcher.
    """

    def __init__(self, device: str, specs: Iterable[RunSpec]) -> None:
        """`device` is "cpu" or "cuda". The process imports the modules that `specs` need."""
        # One spec for each set of imports: a sweep may have thousands of points.
        needed = {(spec.engine.backend, spec.model.family, spec.devices_per_node): spec for spec in specs}
        self._setup = {
            "device": device,
            "specs": [spec.model_dump(mode="json", by_alias=True) for spec in needed.values()],
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, follow: Callable[[Progress], None]) -> bool:
        """Start the process unless it is running, and wait for its imports. Return whether it is ready."""
        if self._process and self._process.poll() is None:
            return True
        self._process = subprocess.Popen(
            build_module_command("bench.runtime", "--series"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches it through this process alone
            preexec_fn=lambda: set_parent_death_signal(signal.SIGTERM),
        )
        self._send(self._setup)
        while not self.poll(self._process):
            follow(Progress("importing"))
            time.sleep(_POLL_S)
        return self._process.poll() is None

    def submit(self, launch: LaunchPlan) -> "subprocess.Popen[bytes]":
        """Send the order to start the attempt whose folder is `launch.folder`."""
        assert self._process
        self._send(str(launch.folder))
        return self._process

    def poll(self, process: "subprocess.Popen[bytes]") -> bool:
        """Return whether the supervisor has finished the last order, or has died."""
        assert process.stdout
        if not select.select([process.stdout], [], [], 0)[0]:
            return False
        if not os.read(process.stdout.fileno(), 1):  # the end of its output
            process.wait()
        return True

    def cancel(self, process: "subprocess.Popen[bytes]") -> None:
        """Ask the supervisor to end the attempt, which then gets a record with the outcome `cancelled`."""
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """End the supervisor process. Called between two attempts."""
        if self._process:
            self._process.terminate()
            self._process.communicate()

    def _send(self, order: object) -> None:
        assert self._process and self._process.stdin
        with contextlib.suppress(BrokenPipeError):  # the supervisor has died; `poll` reports that
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()


def run_attempt(
    requested: RequestedRun, study_folder: Path, follow: Callable[[Progress], None], *, new_repeat: bool = False
) -> MeasuredRun:
    """Wait until no other local run measures, and run one attempt to its end. Return its folder and record.

    `follow` is called with its progress. Ctrl-C ends the attempt with the outcome `cancelled` and is then raised again.
    """
    with take_turn(requested, follow):
        return make_attempt(requested, study_folder, follow, new_repeat=new_repeat)


def take_turn(requested: RequestedRun, follow: Callable[[Progress], None]) -> AbstractContextManager[None]:
    """Return a context in which no other local run of this user measures. Without the launcher's `lock`, it does
    nothing."""
    return alone(lambda text: follow(Progress(text))) if waits(requested) else contextlib.nullcontext()


def waits(requested: RequestedRun) -> bool:
    """Return whether a run waits until no other local run measures, as its launcher's `lock` says."""
    return bool(requested.circumstance.launcher.get("lock"))


@contextlib.contextmanager
def defer_interrupts() -> Iterator[list[int]]:
    """Yield a list that collects Ctrl-C signals inside the block, in place of a KeyboardInterrupt.

    Without this, an attempt whose folder exists but whose supervisor has not started could stay without a record. Only
    the main thread receives signals; in other threads the list stays empty.
    """
    deferred: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield deferred
        return
    before = signal.signal(signal.SIGINT, lambda number, frame: deferred.append(number))
    try:
        yield deferred
    finally:
        signal.signal(signal.SIGINT, before)


def make_attempt(
    requested: RequestedRun,
    study_folder: Path,
    follow: Callable[[Progress], None],
    supervisor: SweepSupervisor | None = None,
    *,
    new_repeat: bool = False,
) -> MeasuredRun:
    """Run one attempt to its end and return its folder and record. It runs in `supervisor` if that is given and can
    start.

    If another process began an attempt at this point a moment earlier, this attempt ends with the outcome `cancelled`.
    """
    # Imports come before the attempt's folder: they may take so long that the attempt would count as dead.
    forked = supervisor is not None and supervisor.start(follow)
    again, config_folder = new_repeat or requested.control, study_folder / requested.config_id
    options = dict(requested.circumstance.launcher)
    launcher = launchers.load_starting(str(options.pop("name")))
    starter = supervisor if supervisor and forked else launcher
    claim = build_heartbeat("claimed")
    with defer_interrupts() as deferred:
        try:
            circumstance = _build_circumstance(requested, forked=forked)
            claimed = store.open_attempt(config_folder, requested.spec, circumstance, new_repeat=again, claim=claim)
        except OSError as error:
            raise store.build_unwritable_error(study_folder, error) from error
        folder = claimed.folder
        # Without the lock, two processes may create attempts at one point. The earlier attempt runs.
        if not (again or waits(requested)) and find_rival_attempt(config_folder, requested.key, before=claimed.attempt):
            reason = "another process began this point a moment earlier"
            left = MeasuredRun(folder, store.finalize(folder, Outcome(kind="cancelled", reason=reason)))
            if deferred:
                raise KeyboardInterrupt
            return left
        work = Work(requested.config_id, folder, "bench.runtime", (str(folder),))
        handle = starter.submit(launcher.plan(work, launcher.Options.model_validate(options)))
    interrupted, watch = False, AttemptWatch(folder, requested.spec.measure)
    while not starter.poll(handle):
        try:
            if deferred:
                deferred.clear()
                raise KeyboardInterrupt
            time.sleep(_POLL_S)
            follow(watch.look())
        except KeyboardInterrupt:
            if not interrupted:
                print("zeroscale: ending the run, with a record …", file=sys.stderr)
            # The loop goes on until the supervisor has ended the ranks and written the record.
            interrupted = True
            starter.cancel(handle)
    if interrupted:
        reason = "interrupted before its supervisor had begun"  # has no effect if there is a record already
        store.finalize(folder, Outcome(kind="cancelled", reason=reason))
        raise KeyboardInterrupt
    reason = "its supervisor died and left no record; run.log may say more"
    return MeasuredRun(folder, store.finalize(folder, Outcome(kind="error", reason=reason)))


def _build_circumstance(requested: RequestedRun, *, forked: bool) -> Any:
    """Return the circumstances of an attempt that starts now, with the same keys in `launcher` as in a packed job."""
    launcher = dict(requested.circumstance.launcher)
    if requested.control:
        launcher["control"] = True
    if forked:
        launcher["started"] = "forked"
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    return requested.circumstance.model_copy(update={"started_at": started_at, "launcher": launcher})
