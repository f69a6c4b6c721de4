"""One line on a terminal that changes while something is under way."""

import contextlib
import sys
from collections.abc import Callable, Iterator


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
