"""The verdicts as text for documents and programs; both hold every word of them."""

import json
from collections.abc import Sequence

from analysis.claims import rule
from analysis.claims.verdicts import Entry, as_table
from analysis.formats import markdown
from analysis.formats.numbers import MISSING

HEAD = ("Claim", "The source", "Machine", "Measured", "Verdict", "Why")


def cells(entry: Entry) -> tuple[str, ...]:
    """Return an entry in the columns of HEAD."""
    words = (entry.claim, entry.text, entry.machine, entry.measured, entry.verdict, entry.why)
    return tuple(word or MISSING for word in words)


def to_markdown(entries: Sequence[Entry]) -> str:
    """Return the rule and a Markdown table."""
    return f"{rule.TEXT}\n\n{markdown.to_markdown(HEAD, [cells(entry) for entry in entries], [False] * len(HEAD))}"


def to_csv(entries: Sequence[Entry]) -> str:
    """Return CSV with a header; what does not apply is empty."""
    return as_table(entries).to_csv(index=False, lineterminator="\n")


def to_json(entries: Sequence[Entry]) -> str:
    """Return a list of objects, one per entry."""
    return json.dumps([entry._asdict() for entry in entries], indent=1, ensure_ascii=False) + "\n"
