"""Published claims about training performance, and the evidence for them in a set of measured runs.

sources   published claims and numbers.
findings  comparisons of measured configurations for each claim; they are analogues, not reproductions.
verdicts  rule for whether comparisons test a claim, and the verdict on each claim.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

from analysis.stats import compare as stats
from analysis.summary import Row
from bench.core.spec import RunSpec

Quantity = Literal["mean_step_s", "moved_bytes", "idle_share"]
"""Quantity by which two configurations are compared. `mean_step_s` is the mean step time over the whole window of
timed steps; the other two are columns of the run table."""
Effect = Literal[
    "faster", "less", "slower", "more", "faster by less than 3 %", "less by less than 3 %", "slower by less than 3 %",
    "more by less than 3 %", "equal within 3 %", "no detectable difference", "too few repeats to tell",
    "first out of memory", "second out of memory", "unknown",
]  # fmt: skip
"""Effect of the second configuration compared with the first. "Faster" and "slower" refer to steps per second; "less"
and "more" refer to any other quantity.

Effects are corrected for the number of comparisons of the finding. A detected difference may be shown to be below 3 %,
the smallest relevant difference. "Equal" means that no difference was detected and that any true one is shown to be
below 3 %. "First out of memory" means that the first configuration never ran, but the second did. "Unknown" means that
a configuration has no measured value for another reason.
"""
Verdict = Literal["reproduced", "contradicted", "cannot be told", "not testable here"]
VERDICTS = (
    "Faster, slower, less and more describe one of two compared configurations: the one with more nodes, the higher "
    "ZeRO stage, tensor slices across nodes, more pipeline stages, layered accumulation or a modular pipeline. "
    "Verdicts: reproduced or contradicted, if the comparisons that test a claim decide for or against it; cannot be "
    "told, if they do not decide it; not testable here, if no comparison meets the conditions of a test. The verdict "
    'after "as an analogue" is that of comparisons that do not test the claim, and decides nothing.'
)
"""Explanation of the effects and verdicts, for readers."""


class Start(NamedTuple):
    """Start time and scheduler allocation of a run."""

    started_at: str  # ISO 8601, UTC; empty where unknown
    allocation: str


Starts = tuple[Start, ...]
"""Start times and allocations of all runs of one of the two compared configurations."""


class ClaimSide(NamedTuple):
    """One of the two configurations that are compared for a claim: the row of the summary table and the spec."""

    row: Row
    spec: RunSpec


class ClaimComparison(NamedTuple):
    """Comparison of two configurations that differ in one respect only. `differ` holds the two values of the setting in
    which they differ, such as their engines. `shared_text` describes the settings that they have in common."""

    before: Row
    after: Row
    differ: tuple[str, str]
    shared_text: str
    tested: stats.Comparison | None  # ratio of `after` to `before`; None if either has no measured value
    as_preset: bool = True  # options that only one of the two engines has are at their preset values
    effect: Effect = "unknown"
    find_starts: Callable[[], tuple[Starts, Starts]] = lambda: ((), ())  # called only if needed
    is_slow_network: bool = False  # the same pair was also compared on a faster network


class Claim(NamedTuple):
    """A claim of a publication, with the rules that select the comparisons for it and judge their effects."""

    id: str
    text: str
    source: str
    shared: Callable[[RunSpec], str]  # key that must be equal for both configurations
    compared: Callable[[RunSpec, RunSpec], bool]  # True if (before, after) is a comparison for this claim
    differ: Callable[[RunSpec, RunSpec], str]  # name of the first configuration that distinguishes it from the second
    judge: Callable[[Mapping[Effect, int]], Verdict]  # from the number of comparisons with each effect
    quantity: Quantity = "mean_step_s"
    of_slow_network: bool = False  # claim about a slow network; testing it needs runs on two networks


class ClaimFinding(NamedTuple):
    """All comparisons of measured configurations that concern a published claim, on one machine with one model."""

    claim: Claim
    machine: str
    model: str
    comparisons: tuple[ClaimComparison, ...]

    @property
    def counts(self) -> Counter[Effect]:
        return Counter(comparison.effect for comparison in self.comparisons)

    @property
    def verdict(self) -> Verdict:
        """Verdict on the claim from all comparisons of this finding, as if each of them tested the claim.
        `analysis.claims.verdicts` decides which comparisons really test it."""
        return self.claim.judge(self.counts)
