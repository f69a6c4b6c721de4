"""How a process of our own is started."""

import sys
from collections.abc import Sequence


def build_module_command(module: str, *arguments: str, python: Sequence[str] = (sys.executable,)) -> list[str]:
    """Return the command that runs a module in a process of its own.

    -P: else files of the current folder are imported before the libraries' and ours; PYTHONPATH counts as ever.
    """
    return [*python, "-P", "-m", module, *arguments]
