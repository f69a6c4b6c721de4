"""How far an attempt here is, as its heartbeat and its protocol tell."""

import time
from pathlib import Path

from bench.formatting import duration
from bench.spec import MeasureSpec
from bench.sweep import snapshot
from bench.terminal import Progress

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
        return Progress(what, self._share, f"at most {duration(left_s)} left")
