"""What the parts of the study on one GPU share: where results lie, what is left of the time, and how a part calls."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from bench.processes import build_module_command

_SHOWN = 15  # last lines of what is kept
_PARTING_S = 30.0  # for a run to end in good order
_BEGAN_AT = time.monotonic()


class StudySession(NamedTuple):
    """One call of the study. `until` is in seconds of the monotonic clock."""

    results: Path  # as `zeroscale --results`
    reports: Path
    machine: str  # a file of conf/machine
    trial: bool  # a tiny model on a CPU in place of every model
    until: float

    @property
    def left_s(self) -> float:
        return self.until - time.monotonic()

    def zeroscale(self, *words: str) -> bool:
        """Run a verb of the command; return whether it came to its end and succeeded."""
        return self.module("bench.cli", *words)

    def module(
        self, name: str, *words: str, environment: dict[str, str] | None = None, output: Path | None = None
    ) -> bool:
        """Run a module, as `call` does."""
        return self.call(*build_module_command(name, *words)[1:], environment=environment, output=output)

    def call(self, *words: str, environment: dict[str, str] | None = None, output: Path | None = None) -> bool:
        """Run Python with `words`, interrupted when the time is over; return whether it came to its end and succeeded.

        What it prints goes to `output`, if given, which is there only after a success; before, it is `.partial`.
        """
        if self.left_s <= 0:
            return False
        _print_progress(" ".join(words).replace("-P -m bench.cli", "zeroscale"))
        if output is None:
            return self._wait(words, environment, None) == 0
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = output.with_suffix(".partial")
        with partial.open("wb") as file:
            succeeded = self._wait(words, environment, file.fileno()) == 0
        print("".join(partial.read_text(errors="replace").splitlines(keepends=True)[-_SHOWN:]), end="", flush=True)
        if succeeded:
            partial.replace(output)
        return succeeded

    def in_checkout(self, part: str, needed: str) -> bool:
        """Whether a file of a checkout is here, which an installed package does not hold; say so where it is not."""
        here = Path(needed).is_file()
        if not here:
            _print_progress(f"{part}: needs {needed}, which an installed package does not hold; call it in a checkout")
        return here

    def ask(self, *words: str) -> str:
        """Return what a verb prints that only looks; an empty string if it fails, or the time is over."""
        if self.left_s <= 0:
            return ""
        done = subprocess.run(build_module_command("bench.cli", *words), capture_output=True, text=True, check=False)
        return done.stdout if done.returncode == 0 else ""

    def _wait(self, words: Sequence[str], environment: dict[str, str] | None, output: int | None) -> int:
        """Start in a session of its own, so that it hears of Ctrl-C from us, and once."""
        process = subprocess.Popen(
            (sys.executable, *words), env=os.environ | (environment or {}), stdout=output, start_new_session=True
        )
        try:
            return process.wait(None if math.isinf(self.left_s) else max(0.0, self.left_s))
        except BaseException as error:  # the time is over, or somebody wants an end
            process.send_signal(signal.SIGINT)
            try:
                process.wait(_PARTING_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                _print_progress("the time is over; what is left is for the next call")
                return 1
            raise


def _print_progress(text: str) -> None:
    minutes, seconds = divmod(round(time.monotonic() - _BEGAN_AT), 60)
    print(f"{minutes}:{seconds:02} {text}", flush=True)
