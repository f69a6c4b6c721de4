"""The report's section on claims of the published ZeRO study: the verdict on each claim, and caveats. A comparison of
runs with other models or on other machines than in the study is called an analogue. An analogue does not reproduce the
study."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, get_args

from analysis import formats
from analysis.claims import VERDICTS, Claim, ClaimComparison, ClaimFinding, Effect, Verdict
from analysis.claims.findings import as_table
from analysis.claims.sources import STUDY
from analysis.claims.verdicts import decide
from analysis.formats import (
    MISSING,
    format_interval_kind,
    format_interval_of,
    format_significant,
    format_within,
    join_markdown,
    join_words,
)
from analysis.stats import compare as stats
from analysis.summary import Row, is_disturbed
from bench.core.formatting import format_count

CSV, MARKDOWN = "claims.csv", "claims.md"


class Analogue(NamedTuple):
    """Contents of the report's section on published claims as plain values, which the page and the Markdown file
    render."""

    what: str
    caveats: tuple[str, ...]
    findings: tuple[tuple[Claim, str, str, str], ...]  # claim, place, verdict, counts of comparisons
    comparisons: tuple[tuple[str, ...], ...]  # cells under HEAD


_NO_TEST: Verdict = "not testable here"
HEAD = (
    "Claim", "Model and machine", "Equal settings", "From", "To", "Effect on steps per second",
    "Ratio of mean step times", "From: median step time, s", "To: median step time, s",
)  # fmt: skip


def build_analogue(found: Sequence[ClaimFinding], notes: Mapping[str, str]) -> Analogue | None:
    """Return the report's section on the claims of the published ZeRO study, or None if no claim could be compared with
    measurements.

    `notes` maps names of machines to their descriptions.
    """
    if not found:
        return None
    compared = [comparison for finding in found for comparison in finding.comparisons]
    findings = [(one.claim, _format_place(one), _format_verdict(one), _format_counts(one)) for one in found]
    are_analogues = all(verdict.startswith(_NO_TEST) for _, _, verdict, _ in findings)
    machines = dict.fromkeys(finding.machine for finding in found)
    known = [f"{machine}: {notes[machine]}." for machine in machines if notes.get(machine)]
    cells = tuple(_format_comparison(finding, one) for finding in found for one in finding.comparisons)
    models = _describe_models(compared, are_analogues=are_analogues)
    return Analogue(models, (VERDICTS, *known, *_list_caveats(compared)), tuple(findings), cells)


def render_claim_tables(found: Sequence[ClaimFinding], section: Analogue | None) -> dict[str, bytes]:
    """Return the CSV and Markdown files of the report's section on published claims, by path. Empty if there is no such
    section."""
    if section is None:
        return {}
    return {CSV: formats.to_csv(as_table(found)).encode(), MARKDOWN: _render_markdown(section).encode()}


def _format_verdict(finding: ClaimFinding) -> str:
    verdict, _ = decide([finding])
    return f"{verdict}; as an analogue: {finding.verdict}" if verdict == _NO_TEST else verdict


def _describe_models(compared: Sequence[ClaimComparison], *, are_analogues: bool) -> str:
    rows = [row for comparison in compared for row in (comparison.before, comparison.after)]
    # The last row of a model has the most ok runs, so its parameter count is the one counted in a run.
    sizes = {row["model"]: row["parameters"] for row in sorted(rows, key=lambda row: row["n"])}
    models = [
        f"{model} ({f'{format_significant(size / 1e6, 3)}M' if size else 'unknown'} parameters)"
        for model, size in sizes.items()
    ]
    machines = dict.fromkeys(row["machine"] for row in rows)
    kind = "These runs are an analogue and not a reproduction. " if are_analogues else ""
    return (
        f"{kind}The study ({STUDY}) trained mT5 models of 580M to 13B parameters on its own machines. These runs "
        f"trained {join_words(models)} on {join_words(machines)}."
    )


def _list_caveats(compared: Sequence[ClaimComparison]) -> Iterable[str]:
    kinds = {row["interval_kind"] for comparison in compared for row in (comparison.before, comparison.after)}
    if "within the run" in kinds:
        yield (
            "A comparison of single runs (n = 1) is indicative only, because its interval comes from the steps of "
            "these two runs."
        )
    if "range of repeats" in kinds:
        yield "The range of fewer than 6 repeats is not a 95 % interval. It is shown with its own confidence level."
    yield (
        f"There are {format_count(len(compared), 'comparison')}. Verdicts are corrected for the number of comparisons "
        f"of each claim. A single slowdown of {100 * stats.INTEREST:g} % or more decides C1 and C2; a smaller slowdown "
        "does not."
    )
    nodes = [(one.before, one.after) for one in compared if one.before["nodes"] != one.after["nodes"]]
    if any(before["global_batch"] != after["global_batch"] for before, after in nodes):
        yield (
            "With the same work per device, a step does more work on more nodes. More steps per second cannot be "
            "expected then, so C1 is not informative."
        )
    yield "The cause that C1 names, communication overhead, is not tested."


def _format_comparison(finding: ClaimFinding, comparison: ClaimComparison) -> tuple[str, ...]:
    tested, ratio = comparison.tested, MISSING
    if tested:
        ends = tested.interval if tested.decides else None
        ratio = format_interval_of(tested.ratio, ends.low, ends.high) if ends else format_significant(tested.ratio, 3)
    before, after = _format_step_time(comparison.before), _format_step_time(comparison.after)
    what = (finding.claim.id, _format_place(finding), comparison.shared_text, *comparison.differ)
    return *what, comparison.effect, ratio, before, after


def _format_step_time(row: Row) -> str:
    if row["step_s"] is None:
        return "busy" if is_disturbed(row) else str(row["outcome"]).replace("_", " ")
    value, low, high = row["step_s"], row["step_s_low"], row["step_s_high"]
    text, *ends = format_within(value, low, high) if low is not None else (format_significant(value), MISSING)
    kind = [format_interval_kind(row)] if low is not None else []
    details = [" to ".join(ends), *kind, f"n\u00a0=\u00a0{row['n']}", *row["flags"].split()]
    return f"{text} ({', '.join(details)})"


def _format_counts(finding: ClaimFinding) -> str:
    if not finding.comparisons:
        return "nothing to compare"
    counts_text = ", ".join(f"{count} {effect}" for effect in get_args(Effect) if (count := finding.counts[effect]))
    # Failures (n = 0) count as comparisons, but not as repeats.
    repeats = {row["n"] for comparison in finding.comparisons for row in (comparison.before, comparison.after)} - {0}
    ends = " to ".join(map(str, sorted({min(repeats), max(repeats)}))) if repeats else ""
    return f"{counts_text} (n\u00a0=\u00a0{ends})" if ends else counts_text


def _format_place(finding: ClaimFinding) -> str:
    return f"{finding.model}, {finding.machine}"


def _render_markdown(section: Analogue) -> str:
    # cells need no escaping, since they hold only names, numbers and texts of zeroscale
    findings = [(claim.id, claim.text, *rest) for claim, *rest in section.findings]
    head = ("Claim", "Published statement", "Model and machine", "Verdict", "Comparisons")
    verdicts = join_markdown(head, findings, [False] * len(head))
    comparisons = join_markdown(HEAD, section.comparisons, [False] * len(HEAD))
    caveats = "".join(f"- {caveat}\n" for caveat in section.caveats)
    return f"{section.what}\n\n{caveats}\n{verdicts}\n{comparisons}"
