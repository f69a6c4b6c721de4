"""One attempt at a point here: started when no other local run of this user measures, followed, and seen to its end."""

import contextlib
import fcntl
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, NamedTuple

from bench import launchers
from bench.core import store
from bench.core.files import get_cache_folder
from bench.core.formatting import format_duration
from bench.core.record import Outcome, RunRecord
from bench.core.scheduling import Work
from bench.core.spec import MeasureSpec
from bench.core.terminal import Progress
from bench.runtime.outcome import build_heartbeat
from bench.sweep import snapshot
from bench.sweep.definition import RequestedRun
from bench.sweep.snapshot import find_rival_attempt

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


_NEARLY = 0.99  # of a run that has taken as long as it may, and goes on


class AttemptWatch:
    """Looks at one attempt again and again. A run says at which step it is, and its protocol how long it may go on."""

    def __init__(self, folder: Path, protocol: MeasureSpec) -> None:
        self._folder, self._protocol = folder, protocol
        self._first: tuple[int, float] | None = None  # the first step that was seen, and when
        self._share: float | None = None

    def look(self) -> Progress:
        """Return what the attempt is doing, and what is left of the longest that it may take."""
        beat = snapshot.read_heartbeat(self._folder)
        if not beat or not beat.ranks:
            return Progress("starting")
        behind = min(beat.ranks, key=lambda rank: rank.step)
        if behind.step < 0:  # before its steps, or after them
            return Progress(behind.phase, self._share)
        return self.of_step(behind.step, time.monotonic(), behind.phase)

    def of_step(self, step: int, now_s: float, phase: str) -> Progress:
        """Return how far a run is whose slowest rank is at `step`: at most all of its warm-up and of its window."""
        at, since_s = self._first = self._first or (step, now_s)
        what = f"{phase} {step}"
        if step == at:
            return Progress(what)
        step_s = (now_s - since_s) / (step - at)
        protocol = self._protocol
        window_s = min(protocol.max_s, max(protocol.min_steps * step_s, protocol.window_s))
        most_s = max(protocol.warmup_steps * step_s, protocol.gpu_warmup_s) + window_s
        left_s = max(0.0, most_s - step * step_s)
        self._share = min(1 - left_s / most_s, _NEARLY)
        return Progress(what, self._share, f"at most {format_duration(left_s)} left")


_POLL_S = 0.1


class MeasuredRun(NamedTuple):
    """An attempt that has ended."""

    folder: Path
    record: RunRecord


def run_attempt(
    requested: RequestedRun, study_folder: Path, follow: Callable[[Progress], None], *, new_repeat: bool = False
) -> MeasuredRun:
    """Run one attempt to its end, after whoever measures here now; return its folder and its record. `follow` is
    called with its progress.

    Ctrl-C ends the attempt in good order, with a record `cancelled`, and is then raised again.
    """
    with take_turn(requested, follow):
        return make_attempt(requested, study_folder, follow, new_repeat=new_repeat)


def take_turn(requested: RequestedRun, follow: Callable[[Progress], None]) -> AbstractContextManager[None]:
    """Return a context in which no other local run of this user measures, if its launcher has a `lock`."""

    def wait(text: str) -> None:
        follow(Progress(text))

    return alone(wait) if waits(requested) else contextlib.nullcontext()


def waits(requested: RequestedRun) -> bool:
    """Whether a run waits for its turn."""
    return bool(requested.circumstance.launcher.get("lock"))


@contextlib.contextmanager
def defer_interrupts() -> Iterator[list[int]]:
    """Yield a list of the Ctrl-C that came meanwhile. An attempt that is claimed, and whose supervisor is not watched
    yet, would stay without a record. In a thread, which hears none, it stays empty."""
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
    requested: RequestedRun, study_folder: Path, follow: Callable[[Progress], None], *, new_repeat: bool = False
) -> MeasuredRun:
    """Run one attempt to its end. One that somebody else began a moment earlier is left to them."""
    update: dict[str, Any] = {"started_at": datetime.now(UTC).isoformat(timespec="seconds")}
    if requested.control:
        update["launcher"] = requested.circumstance.launcher | {"control": True}
    circumstance = requested.circumstance.model_copy(update=update)
    again, config_folder = new_repeat or requested.control, study_folder / requested.config_id
    options = dict(requested.circumstance.launcher)
    launcher = launchers.load_starting(str(options.pop("name")))
    claim = build_heartbeat("claimed")
    with defer_interrupts() as deferred:
        try:
            claimed = store.open_attempt(config_folder, requested.spec, circumstance, new_repeat=again, claim=claim)
        except OSError as error:
            raise store.build_unwritable_error(study_folder, error) from error
        folder = claimed.folder
        if not (again or waits(requested)) and find_rival_attempt(config_folder, requested.key, before=claimed.attempt):
            reason = "another process was faster by a moment"
            left = MeasuredRun(folder, store.finalize(folder, Outcome(kind="cancelled", reason=reason)))
            if deferred:
                raise KeyboardInterrupt
            return left
        work = Work(requested.config_id, folder, "bench.runtime", (str(folder),))
        handle = launcher.submit(launcher.plan(work, launcher.Options.model_validate(options)))
    interrupted, watch = False, AttemptWatch(folder, requested.spec.measure)
    while not launcher.poll(handle):
        try:
            if deferred:
                deferred.clear()
                raise KeyboardInterrupt
            time.sleep(_POLL_S)
            follow(watch.look())
        except KeyboardInterrupt:
            if not interrupted:
                print("zeroscale: ending the run in good order …", file=sys.stderr)
            interrupted = True
            launcher.cancel(handle)
    if interrupted:
        reason = "interrupted before its supervisor had begun"  # or else there is a record already
        store.finalize(folder, Outcome(kind="cancelled", reason=reason))
        raise KeyboardInterrupt
    reason = "its supervisor died and left no record; run.log may tell more"
    return MeasuredRun(folder, store.finalize(folder, Outcome(kind="error", reason=reason)))
