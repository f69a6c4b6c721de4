"""How sure the answers are: the doubts about a whole set of runs, one sentence each, worst first."""

from collections import Counter
from collections.abc import Iterable, Sequence

from analysis.flags import FLAGS
from analysis.report.provenance import Provenance
from analysis.summary import Row
from analysis.table import raised
from analysis.verify import REFERENCE, Verdict


def doubts(verdicts: Sequence[Verdict], summary: Sequence[Row], origin: Provenance) -> list[str]:
    """Return what a reader must know before believing a number of the set."""
    return [*_repeats(summary), *_failures(summary), *_losses(verdicts), *_flags(verdicts), *_environments(origin)]


def _repeats(summary: Sequence[Row]) -> Iterable[str]:
    counts = [row["n"] for row in summary if row["n"]]
    if counts and max(counts) == 1:
        yield (
            "Every configuration ran once (n = 1): its interval says how steady that run was, not what another run "
            "would give."
        )
    elif counts and min(counts) < 6:
        yield (
            f"Configurations ran {min(counts)} to {max(counts)} times: below 6 repeats no 95 % interval between them "
            "exists, and their range is shown with its own level."
        )


def _failures(summary: Sequence[Row]) -> Iterable[str]:
    ended = Counter(row["outcome"] for row in summary if not row["n"])
    if ended:
        told = ", ".join(f"{count} {outcome.replace('_', ' ')}" for outcome, count in ended.most_common())
        yield f"{ended.total()} of {len(summary)} configurations have no number: {told}."


def _losses(verdicts: Sequence[Verdict]) -> Iterable[str]:
    others = [v for v in verdicts if v.record.outcome.kind == "ok" and v.record.spec.engine.backend != REFERENCE]
    verified = sum(not verdict.unverified for verdict in others)
    if others:
        yield f"{verified} of {len(others)} ok runs of other engines have losses verified beside {REFERENCE}."


def _flags(verdicts: Sequence[Verdict]) -> Iterable[str]:
    good = [verdict for verdict in verdicts if verdict.record.outcome.kind == "ok"]
    counts = Counter(flag for verdict in good for flag in raised(verdict) if flag != "unverified")
    for flag in FLAGS:
        if counts[flag]:
            yield f"{counts[flag]} of {len(good)} ok runs carry the flag {flag}: such a run {FLAGS[flag].meaning}."


def _environments(origin: Provenance) -> Iterable[str]:
    if len(origin.classes) > 1:
        differ = ", ".join(fact.name for fact in origin.facts if fact.differs and fact.decides)
        yield f"{len(origin.classes)} environment classes, never pooled; they differ in {differ}."
    if origin.unknown:
        yield f"{origin.unknown} runs ended before their environment was looked at."
