"""What Ctrl-C and a scheduler send to whoever is to end."""

import signal
from collections.abc import Callable


def install_handlers(interrupt: Callable[[int], None]) -> None:
    """From now on call `interrupt` with the number of every such signal."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda sent, frame: interrupt(sent))
