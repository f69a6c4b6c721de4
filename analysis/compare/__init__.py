"""Comparison of two sets of runs, A and B, configuration by configuration: faster, slower, equal or not comparable.

- `fields`: fields in which configurations differ, and fields that `--across` allows to differ
- `pairing`: pairs of a configuration of A and one of B, and names of the pairs
- `judging`: result of a pair, from its times, counts and bytes; pass or fail by the limits of a gate
- `phrases`: wording of the results
- `output`: text, Markdown, JUnit XML, JSON and CSV
"""

from collections.abc import Mapping
from typing import Literal, NamedTuple

from analysis.compare.fields import VariedField
from analysis.compare.judging import NOT_COMPARED, Gate, PairResult, judge_pairs
from analysis.compare.pairing import describe_nearest_miss, label_pairs, list_configurations, pair_configurations
from analysis.results import Results

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]

_EXIT_CODES: Mapping[Verdict | None, int] = {None: 0, "PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}


class ComparisonSetup(NamedTuple):
    """Options of a comparison of two sets of runs, A and B."""

    called: tuple[str, str]  # display names of A and B
    across: tuple[VariedField, ...] = ()
    gate: Gate | None = None
    paired: bool = False  # repeat n of A and repeat n of B ran one after the other
    keep_disturbed: bool = False  # with `paired` only: busy runs count, since background load affects both sides


class SetComparison(NamedTuple):
    """Comparison of two sets of runs: its options, and the name and result of each pair of configurations."""

    question: ComparisonSetup
    lines: tuple[tuple[str, PairResult], ...]
    note: str = ""  # if no configurations could be paired: the differences between the most similar two

    @property
    def verdict(self) -> Verdict | None:
        """The verdict of the regression gate; None without a gate.

        The verdict is FAIL if a pair breaks the gate, or if A and B share no configuration. Otherwise, it is
        INCONCLUSIVE if some pair neither keeps nor breaks the gate (the gate is then open for this pair). If all pairs
        keep the gate, the verdict is PASS.
        """
        if self.question.gate is None:
            return None
        if self.breaking() or not any(line.is_paired for _, line in self.lines):
            return "FAIL"
        return "INCONCLUSIVE" if any(line.held == "open" for _, line in self.lines) else "PASS"

    @property
    def exit_code(self) -> int:
        """The exit code of the command: that of the gate's verdict. Without a gate it is 0, or 3 if no configuration
        can be compared, so that a CI job does not pass without any comparison."""
        nothing = all(line.status in NOT_COMPARED for _, line in self.lines)
        return _EXIT_CODES["INCONCLUSIVE" if nothing and self.verdict is None else self.verdict]

    def breaks(self, line: PairResult) -> bool:
        """Return True if a pair of configurations breaks the regression gate, which limits how much worse result set B
        may be than A. If `Gate.strict` is set, a pair for which the gate is undecided also breaks it."""
        gate = self.question.gate
        return gate is not None and (line.held == "broken" or (gate.strict and line.held == "open"))

    def breaking(self) -> list[str]:
        """Return the names of the pairs that break the regression gate."""
        return [name for name, line in self.lines if self.breaks(line)]


def compare(a: Results, b: Results, question: ComparisonSetup) -> SetComparison:
    """Compare two sets of results, configuration by configuration. A configuration of `a` and its counterpart in `b`
    may differ in the fields of `question.across`.

    Raise UserError if a field of `question.across` does not exist, or if two configurations of one set differ only in
    these fields.
    """
    if question.paired and question.keep_disturbed:
        a, b = a.with_disturbed, b.with_disturbed
    ours, theirs = list_configurations(a), list_configurations(b)
    found = pair_configurations(ours, theirs, question.across)
    judged = judge_pairs(a, b, found, question.gate, paired=question.paired)
    note = "" if any(pair.a and pair.b for pair in found) else describe_nearest_miss(ours, theirs)
    return SetComparison(question, tuple(zip(label_pairs(found), judged, strict=True)), note)
