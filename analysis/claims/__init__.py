"""Claims of published work, and the findings of a set of runs about them.

sources   the claims and published numbers.
findings  comparisons of a set of runs for each claim; they are analogues, not reproductions.
verdicts  the rule that decides whether comparisons test a claim, and the verdict on it.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from analysis.stats import compare as stats
from analysis.summary import Row
from bench.core.spec import RunSpec

Quantity = Literal["sample_s", "moved_bytes", "idle_share"]
"""Quantity that two configurations are compared by: seconds per sample over the whole window, or a column of the run
table."""
Effect = Literal[
    "faster", "less", "slower", "more", "faster by less than 3 %", "less by less than 3 %", "slower by less than 3 %",
    "more by less than 3 %", "equal within 3 %", "no detectable difference", "too few repeats to tell",
    "first out of memory", "second out of memory", "unknown",
]  # fmt: skip
"""Effect of the second configuration compared with the first: in steps per second, or less and more of another
quantity.

It is corrected for the number of comparisons of the finding. A detected difference may be shown to be below 3 %, the
smallest relevant one; "equal" means that none was detected. "Out of memory" means that one side never ran and the other
did; "unknown" that a side has no number for another reason.
"""
Verdict = Literal["as in the study", "not as in the study", "cannot be told"]


class Start(NamedTuple):
    """Start time and allocation of a run."""

    started_at: str  # ISO 8601, UTC; empty where unknown
    allocation: str


Starts = tuple[Start, ...]
"""Starts of the runs behind one side of a comparison."""


class ClaimSide(NamedTuple):
    """One of two configurations that are compared: its row of the summary and its spec."""

    row: Row
    spec: RunSpec


class ClaimComparison(NamedTuple):
    """Two configurations that differ in one thing; `shared_text` describes what they share."""

    before: Row
    after: Row
    differ: tuple[str, str]
    shared_text: str
    tested: stats.Comparison | None  # the second's over the first's; None if a side has no number
    as_preset: bool = True  # options that only one of their engines knows are as in its preset
    effect: Effect = "unknown"
    find_starts: Callable[[], tuple[Starts, Starts]] = lambda: ((), ())  # reads records, so it is called only if needed
    is_slow_network: bool = False  # the same two were also compared on a machine with a faster network


class Claim(NamedTuple):
    """A claim of a source, and the comparisons in a set of runs that support or contradict it."""

    id: str
    text: str
    source: str
    shared: Callable[[RunSpec], str]  # key that two compared configurations must share
    compared: Callable[[RunSpec, RunSpec], bool]  # whether two such configurations are compared, in this order
    differ: Callable[[RunSpec, RunSpec], str]  # name of the first, compared with the second
    judge: Callable[[Mapping[Effect, int]], Verdict]
    quantity: Quantity = "sample_s"
    of_slow_network: bool = False  # about a slow network: a test needs two networks


class ClaimFinding(NamedTuple):
    """The comparisons for a claim on one machine with one model."""

    claim: Claim
    machine: str
    model: str
    comparisons: tuple[ClaimComparison, ...]

    @property
    def counts(self) -> Counter[Effect]:
        return Counter(comparison.effect for comparison in self.comparisons)

    @property
    def verdict(self) -> Verdict:
        return self.claim.judge(self.counts)
