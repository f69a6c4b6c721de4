"""What a user did that cannot be done, said in one line: the value, the rule it breaks, the remedy."""

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Ends a command with one line on standard error and a non-zero exit code, never with a traceback."""

    def __init__(self, value: str, rule: str, remedy: str = "") -> None:
        super().__init__(": ".join(part for part in (value, rule) if part) + (f"; {remedy}" if remedy else ""))
        self.value, self.rule, self.remedy = value, rule, remedy


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the remedy for a name nobody knows: its nearest neighbour, or else the names that exist."""
    known = sorted(set(known))
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else f"choose from {', '.join(known)}"
