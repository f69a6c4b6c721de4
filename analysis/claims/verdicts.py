"""Each claim of the sources beside what was measured, with a verdict and why; as text for documents and programs.

An analogue, such as a tiny model on a CPU, is never called a reproduction: `analysis.claims.rule` says what tests a
claim.
"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, get_args

import pandas as pd

from analysis.claims import Claim, ClaimComparison, ClaimFinding, Effect, rule
from analysis.claims.findings import find_findings, name_effects
from analysis.claims.rule import covered
from analysis.claims.sources import CLAIMS, SMALL, STUDY, read_published
from analysis.formats import MISSING, format_markdown_table
from analysis.results import Results
from analysis.stats import compare as stats
from bench.core.formatting import format_count

Verdict = Literal["reproduced", "contradicted", "cannot be told", "not testable here"]

_NOTHING_TO_COMPARE = {
    True: "the set spans neither two node counts nor two ZeRO stages on several nodes",
    False: "the set has no two layouts on several nodes that differ in this only",
}
_VERDICTS: dict[str, Verdict] = {"as in the study": "reproduced", "not as in the study": "contradicted"}
_BELOW: Counter[Effect] = Counter([stats.EQUAL, *SMALL.values()])
"""Effects below the smallest that anybody would act on."""


class Entry(NamedTuple):
    """What became of one claim on one machine; `machine` is empty where nothing there can speak for it."""

    claim: str
    text: str
    source: str
    machine: str
    measured: str
    verdict: Verdict
    why: str


def judge(results: Results) -> list[Entry]:
    """Return an entry for each claim of the sources and each machine where something was compared that is like it."""
    found = find_findings(results)
    weighed = {claim.id: claim for claims in CLAIMS.values() for claim in claims}
    entries: list[Entry] = []
    for row in read_published("claims").rows:
        head = (row["id"], row["claim"], row["source"])
        if row["kind"] == "setting":
            why = "says what was studied, nothing that could be measured"
            entries.append(Entry(*head, "", covered(row["id"], results), "not testable here", why))
        else:
            entries += _entries(head, weighed.get(row["id"]), found)
    return entries


def as_table(entries: Sequence[Entry]) -> pd.DataFrame:
    """Return the entries as a table of text, one row per entry."""
    return pd.DataFrame(entries, columns=list(Entry._fields), dtype="string")


def _entries(head: tuple[str, str, str], claim: Claim | None, found: Sequence[ClaimFinding]) -> Iterator[Entry]:
    machines: dict[str, list[ClaimFinding]] = {}
    for finding in found:
        if finding.claim is claim:
            machines.setdefault(finding.machine, []).append(finding)
    if not machines:
        yield Entry(*head, "", "", "not testable here", _NOTHING_TO_COMPARE[claim is None or claim.source == STUDY])
    for machine, of_machine in machines.items():
        measured = "; ".join(f"{finding.model}: {_counts(finding.counts)}" for finding in of_machine)
        yield Entry(*head, machine, measured, *_weigh(of_machine))


def _weigh(found: Sequence[ClaimFinding]) -> tuple[Verdict, str]:
    """Return the verdict on a claim on one machine, from the models there that test it, and why."""
    short = {finding.model: rule.obstacles(finding) for finding in found}
    tests = [finding for finding in found if not short[finding.model]]
    if not tests:
        analogue = "; ".join(f"{finding.model}: {finding.verdict}" for finding in found)
        return "not testable here", f"{_joined(short)} (analogue: {analogue})"
    claim = tests[0].claim
    counts = _effects(claim, [comparison for finding in tests for comparison in rule.testing(finding)])
    verdict = _VERDICTS.get(claim.judge(counts), "cannot be told")
    why = f"below {100 * stats.INTEREST:g} %: " if verdict == "cannot be told" and counts & _BELOW else ""
    why += f"{', '.join(finding.model for finding in tests)}, corrected for their number: {_counts(counts)}"
    why += "; by its effect, not its cause" if claim.id == "C1" and verdict != "cannot be told" else ""
    if left := Counter(reason for finding in tests for reason in rule.list_rejected(finding)):
        why += f"; left out: {', '.join(f'{count} where {reason}' for reason, count in left.items())}"
    others = {model: why for model, why in short.items() if why}
    return verdict, why + (f"; left out as analogues: {_joined(others)}" if others else "")


def _effects(claim: Claim, comparisons: Sequence[ClaimComparison]) -> Counter[Effect]:
    """Return what all comparisons tell together."""
    tested = [comparison.tested for comparison in comparisons if comparison.tested]
    failed = [comparison.effect for comparison in comparisons if not comparison.tested]
    return Counter([*name_effects(claim, tested), *failed])


def _counts(counts: Counter[Effect]) -> str:
    counts_text = ", ".join(f"{counts[effect]} {effect}" for effect in get_args(Effect) if counts[effect])
    return f"of {format_count(counts.total(), 'comparison')} {counts_text}" if counts_text else "nothing compared"


def _joined(short: dict[str, list[str]]) -> str:
    return "; ".join(dict.fromkeys(why for whys in short.values() for why in whys))


HEAD = ("Claim", "The source", "Machine", "Measured", "Verdict", "Why")


def cells(entry: Entry) -> tuple[str, ...]:
    """Return an entry in the columns of HEAD."""
    words = (entry.claim, entry.text, entry.machine, entry.measured, entry.verdict, entry.why)
    return tuple(word or MISSING for word in words)


def to_markdown(entries: Sequence[Entry]) -> str:
    """Return the rule and a Markdown table."""
    return f"{rule.TEXT}\n\n{format_markdown_table(HEAD, [cells(entry) for entry in entries], [False] * len(HEAD))}"


def to_csv(entries: Sequence[Entry]) -> str:
    """Return CSV with a header; what does not apply is empty."""
    return as_table(entries).to_csv(index=False, lineterminator="\n")


def to_json(entries: Sequence[Entry]) -> str:
    """Return a list of objects, one per entry."""
    return json.dumps([entry._asdict() for entry in entries], indent=1, ensure_ascii=False) + "\n"
