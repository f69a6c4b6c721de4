"""What was looked at on a machine, and what came of it."""

from typing import Literal, NamedTuple

State = Literal["ok", "missing", "note"]


class Finding(NamedTuple):
    """One thing that was looked at. `missing` keeps runs from starting; a `note` does not."""

    subject: str
    state: State
    found: str
    remedy: str = ""
