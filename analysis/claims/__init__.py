"""The claims of published work, and what a set of runs says of them: an analogue of them, never a reproduction. What
tests a claim nevertheless, and the verdict, say `analysis.claims.rule` and `analysis.claims.verdicts`; which claims
there are, `analysis.claims.sources`.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from analysis.stats import compare as stats
from analysis.summary import Row
from bench.core.spec import RunSpec

Quantity = Literal["sample_s", "moved_bytes", "idle_share"]
"""What two configurations are compared by: their seconds per sample over the whole window, or another column of the run
table."""
Effect = Literal[
    "faster", "less", "slower", "more", "faster by less than 3 %", "less by less than 3 %", "slower by less than 3 %",
    "more by less than 3 %", "equal within 3 %", "no detectable difference", "too few repeats to tell",
    "first out of memory", "second out of memory", "unknown",
]  # fmt: skip
"""Of the second configuration compared with the first, in steps per second, or less and more of another quantity,
corrected for the number of comparisons of the finding. A difference may be detected and shown to be below 3 %, the
smallest that anybody would act on; equal is where none was detected. Out of memory is a side that never ran where the
other did; unknown where a side has no number for another reason."""
Verdict = Literal["as in the study", "not as in the study", "cannot be told"]


class Start(NamedTuple):
    """When and in which allocation a run started."""

    started_at: str  # ISO 8601, UTC; empty where unknown
    allocation: str


Starts = tuple[Start, ...]
"""Those of the runs behind one side of a comparison."""


class ClaimSide(NamedTuple):
    """One of two configurations that are compared: its row of the summary, and what was asked."""

    row: Row
    spec: RunSpec


class ClaimComparison(NamedTuple):
    """Two configurations that differ in one thing; `shared_text` says what they share."""

    before: Row
    after: Row
    differ: tuple[str, str]
    shared_text: str
    tested: stats.Comparison | None  # the second's over the first's; None where one has no number
    as_preset: bool = True  # whatever option only one of their engines knows is as its preset has it
    effect: Effect = "unknown"
    find_starts: Callable[[], tuple[Starts, Starts]] = lambda: ((), ())  # reads records, so only where it is needed
    is_slow_network: bool = False  # the same two were compared on a machine with a faster network as well


class Claim(NamedTuple):
    """A claim of a source, and what in a set of runs can speak for or against it."""

    id: str
    text: str
    source: str
    shared: Callable[[RunSpec], str]  # what two configurations must share
    compared: Callable[[RunSpec, RunSpec], bool]  # whether two that do are a comparison, in this order
    differ: Callable[[RunSpec, RunSpec], str]  # what the first is, beside the second
    judge: Callable[[Mapping[Effect, int]], Verdict]
    quantity: Quantity = "sample_s"
    of_slow_network: bool = False  # speaks of a slow network, so that it takes two networks to test


class ClaimFinding(NamedTuple):
    """What became of a claim on one machine with one model."""

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
