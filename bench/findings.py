"""What was looked at, and how it is told: a line each on a terminal, or JSON."""

import json
from collections.abc import Iterable
from typing import Literal, NamedTuple

State = Literal["ok", "missing", "note"]

_STYLES: dict[State, str] = {"ok": "green", "missing": "bold red", "note": "yellow"}
_SUBJECT_WIDTH = 22


class Finding(NamedTuple):
    """One thing that was looked at. `missing` keeps runs from starting; a `note` does not."""

    subject: str
    state: State
    found: str
    remedy: str = ""


def tell(findings: Iterable[Finding], *, as_json: bool) -> int:
    """Print findings as they come, or all as JSON; return the exit code, 0 if nothing is missing."""
    told = []
    for finding in findings:
        told.append(finding)
        if not as_json:
            _print(finding)
    if as_json:
        print(json.dumps([finding._asdict() for finding in told], indent=1))
    return 1 if any(finding.state == "missing" for finding in told) else 0


def _print(finding: Finding) -> None:
    """One line, and one for the remedy; neither is broken, for both hold paths and commands to be copied."""
    from rich.console import Console
    from rich.text import Text

    line = Text(f"{finding.subject:<{_SUBJECT_WIDTH}}  ")
    line.append(f"{finding.state:<{len('missing')}}", _STYLES[finding.state]).append(f"  {finding.found}")
    if finding.remedy:
        line.append(f"\n{'':{_SUBJECT_WIDTH}}  → {finding.remedy}")
    Console().print(line, soft_wrap=True)
