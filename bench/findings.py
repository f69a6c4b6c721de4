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
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(width=_SUBJECT_WIDTH)
    table.add_column(width=len("missing"))
    table.add_column()
    remedy = f"\n→ {finding.remedy}" if finding.remedy else ""
    table.add_row(Text(finding.subject), Text(finding.state, _STYLES[finding.state]), Text(finding.found + remedy))
    Console().print(table)
