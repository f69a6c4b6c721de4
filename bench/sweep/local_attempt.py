"""Run one configuration once on this machine (one attempt). The attempt waits for other local runs, starts a supervisor
process, and follows the run to its end."""

import contextlib
import fcntl
import json
import os
import select
import shlex
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
from typing import IO, NamedTuple

from bench.core import plugins, store
from bench.core.errors import Interrupted
from bench.core.files import get_cache_folder
from bench.core.formatting import describe_result, format_count, format_duration
from bench.core.processes import build_module_command
from bench.core.quantities import was_busy
from bench.core.record import Circumstance, Outcome, RunRecord
from bench.core.scheduling import LaunchPlan, Work
from bench.core.spec import MeasureSpec, RunSpec
from bench.core.terminal import Progress
from bench.runtime.outcome import build_heartbeat, format_signal
from bench.runtime.process import start_child
from bench.sweep import snapshot
from bench.sweep.definition import RequestedRun
from bench.sweep.snapshot import find_rival_attempt

Follow = Callable[[Progress], None]

_LOCK_POLL_S = 0.3
_NOTE_S = 2.0  # interval at which a run's progress is written for waiting processes
_HOLDER_BYTES = 2048
_COMMAND = 60  # maximum length of a command in the lock file, in characters
_POLL_S = 0.1
_NEARLY = 0.99  # largest share shown for a run that takes longer than expected


@contextlib.contextmanager
def alone(follow: Follow) -> Iterator[Follow]:
    """Hold this machine's lock for local runs inside the block, so that only one process measures at a time.

    First wait until the lock is free and this process is the first in the queue. During this wait, `follow` is called
    with the time left of the run that holds the lock. Then yield a function. The block calls this function with the
    progress of its own run. The function calls `follow`, and writes the progress into the lock file for waiting
    processes. If a process dies, the kernel releases its lock. If the lock file cannot be opened, the block runs
    without a lock.
    """
    try:
        lock = path(os.environ)
        lock.parent.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
    except OSError as error:
        _tell(f"no lock against other local runs: {error}")
        yield follow
        return
    with file:
        with _queue(lock) as count_earlier:
            _wait(file, count_earlier, follow)
        holder = LockHolder(os.getpid(), time.time(), _describe_command())
        written_s = -_NOTE_S

        def note(run: Progress) -> None:
            nonlocal written_s
            follow(run)
            if time.monotonic() - written_s >= _NOTE_S:
                written_s = time.monotonic()
                _write_holder(file, holder._replace(left=run.left))

        _write_holder(file, holder)
        yield note
        file.truncate(0)


class LockHolder(NamedTuple):
    """Content of the lock file: the process that measures, and the progress of its run."""

    pid: int
    since: float  # seconds since the epoch
    command: str = ""
    left: str = ""  # estimated time left for its run, as text

    def __str__(self) -> str:
        since = time.strftime("%H:%M:%S", time.localtime(self.since))
        command = f": {self.command}" if self.command else ""
        left = f"; {self.left}" if self.left else ""
        return f"another command is measuring{command} (pid {self.pid}, since {since}{left})"


def _describe_command() -> str:
    """Return this process's command as the user typed it, cut after `_COMMAND` characters."""
    program, *words = sys.argv or [""]
    names = {"__main__.py": "zeroscale", "": "python", "-c": "python"}
    text = shlex.join([names.get(Path(program).name, Path(program).name), *words])
    return text if len(text) <= _COMMAND else f"{text[:_COMMAND]} …"


def _write_holder(file: IO[bytes], holder: LockHolder) -> None:
    """Write the content of the lock file in one call. It is padded to a fixed length, which overwrites all of a longer
    earlier content."""
    content = json.dumps(holder._asdict()).encode()
    with contextlib.suppress(OSError):  # a full disk; waiting processes then know less
        os.pwrite(file.fileno(), content.ljust(_HOLDER_BYTES), 0)


@contextlib.contextmanager
def _queue(lock: Path) -> Iterator[Callable[[], int]]:
    """Join the queue of processes that wait for the lock. Yield a function that counts the processes before this one.

    flock() alone is unfair: a sweep that releases the lock between two points takes it again before a waiting process
    can. Each waiting process has a ticket, a file that it keeps locked and whose name contains the time at which it
    began to wait.
    """
    ticket = lock.with_name(f"{lock.name}.{time.time_ns()}.{os.getpid()}")
    with ticket.open("x") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        others = f"{lock.name}.[0-9]*"
        try:
            yield lambda: sum(_is_waiting(one) for one in lock.parent.glob(others) if one.name < ticket.name)
        finally:
            ticket.unlink(missing_ok=True)


def _is_waiting(ticket: Path) -> bool:
    """Return whether the process that made a ticket still waits for the machine's lock. The process keeps its ticket, a
    file, locked while it waits. The ticket of a process that died is removed."""
    with contextlib.suppress(OSError), ticket.open("rb") as file:
        if not _try_lock(file, fcntl.LOCK_SH):
            return True
        ticket.unlink(missing_ok=True)
    return False


def path(variables: Mapping[str, str]) -> Path:
    """Return the path of this host's lock file. It is in the folder of the user's session, or else in the user's cache
    folder. The file name contains the host name, since several hosts may share the cache folder."""
    session = Path(variables.get("XDG_RUNTIME_DIR", ""))
    folder = session / "zeroscale" if session.is_absolute() and session.is_dir() else get_cache_folder(variables)
    return folder / f"local-{socket.gethostname()}.lock"


def is_held(variables: Mapping[str, str]) -> bool:
    """Return whether a process other than this one holds this machine's lock for local runs. The path of the lock file
    follows from the environment variables `variables`."""
    with contextlib.suppress(FileNotFoundError, PermissionError), path(variables).open("rb") as file:
        if not _try_lock(file, fcntl.LOCK_SH):
            holder = _read_holder(file)
            return holder is None or holder.pid != os.getpid()
    return False


def _wait(file: IO[bytes], count_earlier: Callable[[], int], follow: Follow) -> None:
    """Wait until this process is the first in the queue for the machine's lock and the lock is free, and take the lock.
    `file` is the lock file. `count_earlier` returns the number of processes before this process in the queue. `follow`
    is called with the progress while this process waits."""
    begin, printed = time.monotonic(), False
    while (earlier := count_earlier()) or not _try_lock(file):
        queued = (
            f", and {format_count(earlier, 'command')} {'waits' if earlier == 1 else 'wait'} before this one"
            if earlier
            else ""
        )
        holder = _read_holder(file)
        if not printed:
            waiting = f"waiting: {holder or 'another command is measuring'}{queued}"
            _tell(f"{waiting}. To run at the same time, set launcher.lock=false")
            printed = True
        # The line above names the other command, so the progress need not repeat its name.
        follow(Progress(f"waiting for another command{queued}", left=holder.left if holder else ""))
        time.sleep(_LOCK_POLL_S)
    if printed:
        waited = format_duration(time.monotonic() - begin)
        _tell(f"waited {waited} for other commands; starting")


def _tell(text: str) -> None:
    print(f"zeroscale: {text}", file=sys.stderr, flush=True)


def _try_lock(file: IO[bytes], kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_holder(file: IO[bytes]) -> LockHolder | None:
    """Return the process that holds the lock. None if it is unknown: a process takes the lock first, and then writes
    its facts into the file."""
    try:
        return LockHolder(**json.loads(os.pread(file.fileno(), _HOLDER_BYTES, 0)))
    except (OSError, ValueError, TypeError):
        return None


class AttemptWatch:
    """Reads the progress of one attempt from its heartbeat file. The time left is estimated from the mean step time so
    far and the longest warm-up and measurement window that the protocol allows."""

    def __init__(self, folder: Path, protocol: MeasureSpec) -> None:
        self._folder, self._protocol = folder, protocol
        self._first: tuple[int, float] | None = None  # the first step number that was seen, and the time in seconds
        self._share: float | None = None

    def look(self) -> Progress:
        """Return the current phase of the attempt and, once it is known, an upper limit of the time left."""
        beat = snapshot.read_heartbeat(self._folder)
        if not beat or not beat.ranks:
            return Progress("starting")
        behind = min(beat.ranks, key=lambda rank: rank.step)
        if behind.step < 0:  # the loop of steps has not begun, or has ended
            return Progress(behind.phase, self._share)
        return self.of_step(behind.step, time.monotonic(), behind.phase)

    def of_step(self, step: int, now_s: float, phase: str) -> Progress:
        """Return the progress of a run whose slowest rank is at step number `step` at the time `now_s`, in seconds. The
        share that is done is calculated for the longest run that the protocol allows: with the longest warm-up and the
        longest measurement window."""
        at, since_s = self._first = self._first or (step, now_s)
        what = f"{phase} {step}"
        if step == at:
            return Progress(what)
        step_s = (now_s - since_s) / (step - at)
        protocol = self._protocol
        # A window lasts until both its minimum of steps and its minimum of seconds are reached, and at most `max_s`.
        window_s = min(protocol.max_s, max(protocol.min_steps * step_s, protocol.window_s))
        most_s = max(protocol.warmup_steps * step_s, protocol.gpu_warmup_s) + window_s
        left_s = max(0.0, most_s - step * step_s)
        self._share = min(1 - left_s / most_s, _NEARLY)
        return Progress(what, self._share, f"at most {format_duration(left_s)} left")


class MeasuredRun(NamedTuple):
    """Folder and record of an attempt that has ended."""

    folder: Path
    record: RunRecord

    def __repr__(self) -> str:
        busy = "; busy machine" if was_busy(self.record) else ""
        return f"<MeasuredRun {self.folder}: {describe_result(self.record)}{busy}>"


class SweepSupervisor:
    """One supervisor process that runs all attempts of a local sweep. It is started for the first attempt. It imports
    torch and the engines once and forks the ranks of each attempt, so an attempt starts quickly. The class has the
    methods `submit`, `poll` and `cancel` of a launcher."""

    def __init__(self, device: str, specs: Iterable[RunSpec]) -> None:
        """Prepare the supervisor process without starting it. `device` is "cpu" or "cuda". `specs` are the specs whose
        modules the process imports when it starts."""
        # One spec for each set of imports: a sweep may have thousands of points.
        needed = {(spec.engine.backend, spec.model.family, spec.devices_per_node): spec for spec in specs}
        self._setup = {
            "device": device,
            "specs": [spec.model_dump(mode="json", by_alias=True) for spec in needed.values()],
        }
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, follow: Follow) -> bool:
        """Start the process unless it is running, and wait for its imports. Return whether it is ready; False if it
        died."""
        if self._process and self._process.poll() is None:
            return True
        command = build_module_command("bench.runtime", "--series")
        self._process = start_child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._send(self._setup)
        while not self.poll(self._process):
            follow(Progress("importing"))
            time.sleep(_POLL_S)
        return self._process.poll() is None

    def submit(self, launch: LaunchPlan) -> "subprocess.Popen[bytes]":
        """Send the order to start the attempt whose folder is `launch.folder`. Return the supervisor process."""
        assert self._process
        self._send(str(launch.folder))
        return self._process

    def poll(self, process: "subprocess.Popen[bytes]") -> bool:
        """Return whether the supervisor `process` has finished its last order (to import modules or to run an attempt),
        or has died."""
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


def take_turn(requested: RequestedRun, follow: Follow) -> AbstractContextManager[Follow]:
    """Return a context manager. On entry, the context manager waits until no other local run of this user is being
    measured. Until the end of the block, other local runs wait. The context manager yields the function to call with
    the run's progress. If the launcher's option `lock` is false, no run waits."""
    return alone(follow) if waits(requested) else contextlib.nullcontext(follow)


def waits(requested: RequestedRun) -> bool:
    """Return whether a run waits until no other run is being measured on this machine. The launcher's option `lock`
    decides this."""
    return bool(requested.circumstance.launcher.get("lock"))


@contextlib.contextmanager
def defer_interrupts() -> Iterator[list[int]]:
    """Inside the block, collect the numbers of arriving signals in the yielded list, and raise no KeyboardInterrupt.
    The signals are SIGINT and, if the command handles it like Ctrl-C, SIGTERM.

    Without this function, a signal between the creation of an attempt's folder and the start of its supervisor would
    leave the attempt without a record. Only the main thread receives signals; in other threads the list stays empty.
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
    follow: Follow,
    supervisor: SweepSupervisor | None = None,
    *,
    new_repeat: bool = False,
) -> MeasuredRun:
    """Run one attempt (one try at a point) to its end and return its folder and record. If `supervisor` is given and
    can start, it runs the attempt. Otherwise the launcher starts a new supervisor for the attempt. With `new_repeat`,
    the attempt gets a repeat number that is not used yet. `follow` is called with the progress of the attempt.

    On Ctrl-C, the attempt ends with the outcome `cancelled`, and KeyboardInterrupt is raised.

    If the launcher's option `lock` is false, local runs may overlap. Another process may then have begun an attempt at
    the same point a moment earlier. In that case, this attempt ends at once with the outcome `cancelled`.
    """
    # Imports come before the attempt's folder: they may take so long that the attempt would count as dead.
    forked = supervisor is not None and supervisor.start(follow)
    again, config_folder = new_repeat or requested.control, study_folder / requested.config_id
    options = dict(requested.circumstance.launcher)
    launcher = plugins.load(plugins.STARTING, str(options.pop("name")))
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
            reason = "another process started this point a moment earlier"
            left = MeasuredRun(folder, store.finalize(folder, Outcome(kind="cancelled", reason=reason)))
            if deferred:
                raise KeyboardInterrupt
            return left
        work = Work(requested.config_id, folder, "bench.runtime", (str(folder),))
        handle = starter.submit(launcher.plan(work, launcher.Options.model_validate(options)))
        handled, watch = 0, AttemptWatch(folder, requested.spec.measure)
        # After a signal, the loop goes on until the supervisor has ended the ranks and written the record.
        while not starter.poll(handle):
            if len(deferred) > handled:
                if not handled:
                    _note_interruption(folder, deferred[0])
                handled = len(deferred)
                starter.cancel(handle)
            time.sleep(_POLL_S)
            follow(watch.look())
    # A record that exists already is not changed.
    if handled:
        reason = f"interrupted by {_name_signal(deferred[0])} before its supervisor had started"
        store.finalize(folder, Outcome(kind="cancelled", reason=reason))
        raise Interrupted(folder)
    reason = "its supervisor died and left no record; see run.log"
    record = store.finalize(folder, Outcome(kind="error", reason=reason))
    if deferred:
        raise KeyboardInterrupt
    return MeasuredRun(folder, record)


def _name_signal(number: int) -> str:
    return format_signal(signal.Signals(number).name)


def _note_interruption(folder: Path, number: int) -> None:
    """Print the name of the signal that interrupts an attempt, and write this name to a file. The supervisor copies the
    name from the file into the record. The supervisor itself always receives SIGTERM, even if this process received
    another signal, such as SIGINT."""
    _tell(f"interrupted by {_name_signal(number)}; ending the run and writing its record into {folder} …")
    with contextlib.suppress(OSError):
        note = json.dumps({"signal": signal.Signals(number).name})
        store.write_atomically(folder / store.INTERRUPTED, note.encode())


def _build_circumstance(requested: RequestedRun, *, forked: bool) -> Circumstance:
    """Return the circumstances (where and how a point is measured) of an attempt that starts now. Up to two keys are
    added to the field `launcher` of the circumstances. Attempts in Slurm jobs have the same keys. `control` is True for
    a run of the control point, which is measured repeatedly to detect drift. `started` is "forked" if the ranks are
    forked from a running process."""
    launcher = requested.circumstance.launcher | ({"control": True} if requested.control else {})
    launcher |= {"started": "forked"} if forked else {}
    started_at = datetime.now(UTC).isoformat(timespec="seconds")
    return requested.circumstance.model_copy(update={"started_at": started_at, "launcher": launcher})
