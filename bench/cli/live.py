"""What the command shows while something is under way: lines, and on a terminal one line that changes."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator


def teller(quiet: bool) -> Callable[[str], None]:
    """Return a function that prints a text at once, or says nothing."""
    return (lambda text: None) if quiet else functools.partial(print, flush=True)


@contextlib.contextmanager
def line(quiet: bool) -> Iterator[Callable[[str], None]]:
    """Give a function that shows one changing line on a terminal, and nothing anywhere else."""
    if quiet or not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.status import Status

    with Status("starting", console=Console(stderr=True)) as status:
        yield lambda text: status.update(escape(text))
