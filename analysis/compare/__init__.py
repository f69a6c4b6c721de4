"""Comparison of two sets of results, configuration by configuration: faster, slower, the same or not comparable.

- `fields`: fields in which configurations differ, and those that are compared on purpose
- `pairing`: pairs of a configuration of A and one of B, and their names
- `judging`: the result of a pair, from times, counts and bytes, and the gate
- `phrases`: results in words
- `output`: text, Markdown, JUnit XML, JSON and CSV
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from analysis.compare.fields import VariedField
from analysis.compare.judging import Gate, PairResult, judge_pairs
from analysis.compare.pairing import describe_nearest_miss, label_pairs, list_configurations, pair_configurations
from analysis.results import Results

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]

EXIT_CODES: Mapping[Verdict | None, int] = {None: 0, "PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}


class ComparisonSetup(NamedTuple):
    """Settings of a comparison of two sets."""

    called: tuple[str, str]  # names of A and B
    across: tuple[VariedField, ...] = ()
    gate: Gate | None = None
    paired: bool = False  # repeat n of A and repeat n of B ran one after the other
    keep_disturbed: bool = False  # with `paired` only: busy runs count, since the load was on both sides


class SetComparison(NamedTuple):
    """The result of each pair, by its name."""

    question: ComparisonSetup
    lines: tuple[tuple[str, PairResult], ...]
    note: str = ""  # if no configurations could be paired, the differences of the most similar two

    @property
    def verdict(self) -> Verdict | None:
        """The verdict of the gate; None without a gate.

        It is FAIL if a line breaks the gate or A and B share no configuration, and PASS if every line keeps it.
        """
        if self.question.gate is None:
            return None
        if self.breaking() or not any(line.is_paired for _, line in self.lines):
            return "FAIL"
        return "INCONCLUSIVE" if any(line.held == "open" for _, line in self.lines) else "PASS"

    def breaks(self, line: PairResult) -> bool:
        """Return True if a line breaks the gate; with `strict`, an open line does too."""
        gate = self.question.gate
        return gate is not None and (line.held == "broken" or (gate.strict and line.held == "open"))

    def breaking(self) -> list[str]:
        """Return the names of the lines that break the gate."""
        return [name for name, line in self.lines if self.breaks(line)]


def compare(a: Results, b: Results, question: ComparisonSetup) -> SetComparison:
    """Compare two sets of results. UserError if `across` names no field or is ambiguous."""
    if question.paired and question.keep_disturbed:
        a, b = a.with_disturbed, b.with_disturbed
    ours, theirs = list_configurations(a), list_configurations(b)
    found = pair_configurations(ours, theirs, question.across)
    judged = judge_pairs(a, b, found, question.gate, paired=question.paired)
    note = "" if any(pair.a and pair.b for pair in found) else describe_nearest_miss(ours, theirs)
    return SetComparison(question, tuple(zip(label_pairs(found), judged, strict=True)), note)
