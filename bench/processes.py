"""How a process of our own is started, and how it imports."""

import contextlib
import gc
import sys
from collections.abc import Iterator, Sequence


def build_module_command(module: str, *arguments: str, python: Sequence[str] = (sys.executable,)) -> list[str]:
    """Return the command that runs a module in a process of its own.

    -P: else files of the current folder are imported before the libraries' and ours; PYTHONPATH counts as ever.
    """
    return [*python, "-P", "-m", module, *arguments]


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Search for no garbage while libraries are imported, which leave next to none, nor later through what lives by
    then: a quarter of the time of their imports."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
