"""Two sets of results, configuration by configuration: faster, slower, the same or not comparable.

fields   what sets configurations apart, and which differences are the question
pairing  which configuration of A is set against which of B, and what people call a pair
judging  what a pair says, counts and bytes among it, and the gate
phrases  how a pair is told in words
output   text, Markdown, JUnit XML, JSON and CSV
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from analysis.compare.fields import VariedField
from analysis.compare.judging import Gate, PairResult, lines
from analysis.compare.pairing import describe_nearest_miss, label_pairs, list_configurations, pair_configurations
from analysis.results import Results

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]

EXIT_CODES: Mapping[Verdict | None, int] = {None: 0, "PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}


class ComparisonSetup(NamedTuple):
    """How two sets are compared."""

    called: tuple[str, str]  # A and B
    across: tuple[VariedField, ...] = ()
    gate: Gate | None = None
    paired: bool = False  # repeat n of A and of B were made one after the other
    keep_disturbed: bool = False  # of paired runs alone: busy ones count too, as `zeroscale ab` promises


class SetComparison(NamedTuple):
    """The answer: a line for each pair, by name."""

    question: ComparisonSetup
    lines: tuple[tuple[str, PairResult], ...]
    note: str = ""  # where A and B share no configuration, what keeps two of them apart

    @property
    def verdict(self) -> Verdict | None:
        """What becomes of the gate; None without one.

        It fails by a line, or because A and B share no configuration; it passes where every line keeps it.
        """
        if self.question.gate is None:
            return None
        if self.breaking() or not any(line.is_paired for _, line in self.lines):
            return "FAIL"
        return "INCONCLUSIVE" if any(line.held == "open" for _, line in self.lines) else "PASS"

    @property
    def broken(self) -> bool:
        """Whether the gate fails."""
        return self.verdict == "FAIL"

    def breaks(self, line: PairResult) -> bool:
        """Whether a line breaks the gate."""
        gate = self.question.gate
        return gate is not None and (line.held == "broken" or (gate.strict and line.held == "open"))

    def breaking(self) -> list[str]:
        """Return the names of the lines that break the gate."""
        return [name for name, line in self.lines if self.breaks(line)]


def compare(a: Results, b: Results, question: ComparisonSetup) -> SetComparison:
    """Compare two sets of results; UserError for what `across` cannot mean."""
    if question.paired and question.keep_disturbed:
        a, b = a.with_disturbed, b.with_disturbed
    ours, theirs = list_configurations(a), list_configurations(b)
    found = pair_configurations(ours, theirs, question.across)
    judged = lines(a, b, found, question.gate, paired=question.paired)
    note = "" if any(pair.a and pair.b for pair in found) else describe_nearest_miss(ours, theirs)
    return SetComparison(question, tuple(zip(label_pairs(found), judged, strict=True)), note)
