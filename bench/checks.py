"""What was looked at on a machine, and what came of it."""

from typing import Literal, NamedTuple

CheckState = Literal["ok", "missing", "note"]


class Check(NamedTuple):
    """One thing that was looked at. `missing` keeps runs from starting; a `note` does not."""

    subject: str
    state: CheckState
    found: str
    remedy: str = ""
