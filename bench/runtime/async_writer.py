"""Writing beside the watching: a file system that stalls must delay no rank, and look like no hang and no lost node."""

import contextlib
import threading
from collections.abc import Callable


class AsyncWriter:
    """Does one write at a time on a thread of its own; what cannot be written is given up."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self, write: Callable[[], object]) -> bool:
        """Begin to write, unless the last write is still under way; return whether it was begun."""
        if self.busy:
            return False

        def run() -> None:
            with contextlib.suppress(OSError):
                write()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        return True

    def wait(self, seconds: float) -> None:
        """Give what is under way some time."""
        if self._thread:
            self._thread.join(seconds)
