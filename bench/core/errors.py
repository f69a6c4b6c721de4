"""Errors for users, each printed as one line of the form `value: rule; remedy`, and results of checks of a machine."""

import difflib
import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

_LISTED = 200
"""Maximum length in characters of a list of known names in an error message. It keeps the message readable."""
# Escape sequences of terminals, and control characters except tab and newline.
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class UserError(Exception):
    """Error caused by the user's input or machine. The command prints it as one line on standard error, without a
    traceback, and exits with `exit_code`."""

    exit_code = 2

    def __init__(self, value: str, rule: str, remedy: str = "") -> None:
        super().__init__(": ".join(part for part in (value, rule) if part) + (f"; {remedy}" if remedy else ""))
        self.value, self.rule, self.remedy = value, rule, remedy


class NoPrediction(UserError):
    """Error: a memory or time cost is unknown, because the engine or model family does not define it."""


def suggest_nearest(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return a remedy for an unknown name: a suggestion of the most similar known name. If no known name is similar,
    return `otherwise`. If `otherwise` is empty, return a list of known names within 200 characters."""
    known = sorted(set(known))
    if close := difflib.get_close_matches(word, known, n=1, cutoff=0.55):
        return f"did you mean {close[0]}?"
    return otherwise or f"choose from {list_names(known)}"


def list_names(names: Iterable[str]) -> str:
    """Return sorted names as a list within 200 characters. A longer list is cut and ends in the number of names."""
    known = sorted(set(names))
    listed = ", ".join(known)
    if len(listed) > _LISTED:
        listed = f"{listed[: listed.rindex(', ', 0, _LISTED)]}, … ({len(known)} in all)"
    return listed


def make_printable(text: str) -> str:
    """Return text from outside the program without escape sequences and control characters, except newlines and tabs.
    Lone surrogates, which cannot be encoded in UTF-8, become backslash escapes."""
    return _CONTROL.sub("", text).encode(errors="backslashreplace").decode()


class Interrupted(KeyboardInterrupt):
    """Interruption by Ctrl-C or SIGTERM. It is raised after a message about the interruption was printed on standard
    error. If an attempt was interrupted, the exception's argument is the attempt's folder, which has a record."""


CheckState = Literal["ok", "missing", "note"]


class Check(NamedTuple):
    """Result of a check of one part of a machine, such as its disk or a package. The state `missing` prevents runs;
    `note` does not."""

    subject: str
    state: CheckState
    found: str
    remedy: str = ""
