"""What ends a command in one line: the value, the rule it breaks, the remedy.

The package's own `bench.core.errors` does the same, but a testbed runs as root with the system's Python, where the
package is not installed.
"""


class Problem(Exception):
    """Something went wrong on the way; what was begun has been undone."""

    exit_code = 1

    def __init__(self, value: str, rule: str, remedy: str = "", *, detail: str = "") -> None:
        super().__init__(f"{value}: {rule}" + (f"; {remedy}" if remedy else ""))
        self.detail = detail  # lines for a person to read before, such as the end of a log


class RefusedCommand(Problem):
    """Asked for what cannot be done; nothing was touched."""

    exit_code = 2
