"""Errors of users, each in one line (value: rule; remedy), and findings of checks of a machine."""

import difflib
import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

_LISTED = 200
"""Maximum length of a list of known names in characters, so that the error before it stays readable."""
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
    """Return the remedy for an unknown name: the nearest known name or, if none is near, `otherwise`. Without
    `otherwise` it lists the known names, as many as fit into 200 characters."""
    known = sorted(set(known))
    if close := difflib.get_close_matches(word, known, n=1, cutoff=0.55):
        return f"did you mean {close[0]}?"
    listed = ", ".join(known)
    if len(listed) > _LISTED:
        listed = f"{listed[: listed.rindex(', ', 0, _LISTED)]}, … ({len(known)} in all)"
    return otherwise or f"choose from {listed}"


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
