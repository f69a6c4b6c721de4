"""One attempt at a point here: started, followed, and seen to its end."""

import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from bench import launchers, store
from bench.launching import Work
from bench.record import Outcome, RunRecord
from bench.runtime.outcome import build_heartbeat
from bench.sweep.definition import RequestedRun
from bench.sweep.local import lock
from bench.sweep.local.watching import AttemptWatch
from bench.sweep.snapshot import find_rival_attempt
from bench.terminal import Progress

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

    return lock.alone(wait) if waits(requested) else contextlib.nullcontext()


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
