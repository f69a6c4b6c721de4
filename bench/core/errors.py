"""Errors of users, each one line (value, rule, remedy), and findings of checks of a machine."""

import difflib
import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

_STEERING = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class UserError(Exception):
    """Ends a command with one line on standard error and a non-zero exit code, never with a traceback."""

    def __init__(self, value: str, rule: str, remedy: str = "") -> None:
        super().__init__(": ".join(part for part in (value, rule) if part) + (f"; {remedy}" if remedy else ""))
        self.value, self.rule, self.remedy = value, rule, remedy


class NoPrediction(UserError):
    """A cost that is unknown: what would have to describe it does not."""


def suggest_nearest(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the remedy for a name nobody knows: its nearest neighbour, or else the names that exist; of names too many
    to list, what `otherwise` says."""
    known = sorted(set(known))
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else otherwise or f"choose from {', '.join(known)}"


def make_printable(text: str) -> str:
    """Return text of somebody else's without what steers a terminal, and with what no file can be written in spelt out;
    lines and tabs stay."""
    return _STEERING.sub("", text).encode(errors="backslashreplace").decode()


CheckState = Literal["ok", "missing", "note"]


class Check(NamedTuple):
    """One thing that was looked at. `missing` keeps runs from starting; a `note` does not."""

    subject: str
    state: CheckState
    found: str
    remedy: str = ""
