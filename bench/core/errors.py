"""Errors of users, each in one line (value: rule; remedy), and findings of checks of a machine."""

import difflib
import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

# Escape sequences, and control characters except tab and newline.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class UserError(Exception):
    """Ends a command with one line on standard error and a non-zero exit code, never with a traceback."""

    def __init__(self, value: str, rule: str, remedy: str = "") -> None:
        super().__init__(": ".join(part for part in (value, rule) if part) + (f"; {remedy}" if remedy else ""))
        self.value, self.rule, self.remedy = value, rule, remedy


class NoPrediction(UserError):
    """An unknown cost, because the component that would have to describe it does not."""


def suggest_nearest(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return the remedy for an unknown name: the nearest known name, else `otherwise` or a list of all known names."""
    known = sorted(set(known))
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean {close[0]}?" if close else otherwise or f"choose from {', '.join(known)}"


def make_printable(text: str) -> str:
    """Return foreign text without control sequences of terminals, and with lone surrogates, which no file can hold,
    spelt out. Newlines and tabs stay."""
    return _CONTROL.sub("", text).encode(errors="backslashreplace").decode()


CheckState = Literal["ok", "missing", "note"]


class Check(NamedTuple):
    """A finding about one part of a machine. `missing` keeps runs from starting; a `note` does not."""

    subject: str
    state: CheckState
    found: str
    remedy: str = ""
