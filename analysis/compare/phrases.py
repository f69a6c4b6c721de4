"""Wording of the results of a comparison, shared by all output formats for human readers."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import get_args

from analysis.compare import SetComparison
from analysis.compare.fields import name_across
from analysis.compare.judging import PairResult, QuantityChange, Status, format_share
from analysis.formats import MISSING, format_ratio_change, format_significant, format_size
from analysis.stats.compare import LEAST_RUNS
from analysis.summary import Row, is_disturbed
from bench.core.formatting import format_count
from bench.core.statistics import LEVEL

# Table columns; SHORT has those that fit a terminal of 100 columns.
HEAD = (
    "configuration", "B compared with A", "A, s per sample", "B, s per sample", "time change", "compared data",
    "peak memory change", "remarks",
)  # fmt: skip
SHORT = ("configuration", "B compared with A", "time change", "remarks")
RIGHT = ("A, s per sample", "B, s per sample")
_GATE_WORDS = {"broken": "breaks the gate", "open": "inconclusive"}


def format_headline(compared: SetComparison) -> str:
    """Return a summary of one or two lines: the verdict of the regression gate (limits on how much worse B may be than
    A), then how many configurations are faster, slower, equal and so on."""
    counts = Counter(line.status for _, line in compared.lines)
    texts = "; ".join(f"{status}: {counts[status]}" for status in get_args(Status) if counts[status])
    count = format_count(len(compared.lines), "configuration")
    outcome = f"{count}. {texts[0].upper()}{texts[1:]}." if texts else "There is nothing to compare."
    parts = [_describe_gate(compared), outcome]
    if differ := [one for _, line in compared.lines if line.status == "not comparable" for one in line.differ]:
        across = [*(part.name for part in compared.question.across), name_across(differ)]
        parts.append(f"Add --across {','.join(across)} to compare configurations that are not comparable.")
    return " ".join(part for part in parts if part)


def describe_sides(compared: SetComparison) -> str:
    """Return a sentence with the names of A and B, and the differences that `--across` allows."""
    a, b = compared.question.called
    intended = dict.fromkeys(str(one) for _, line in compared.lines for one in line.intended)
    return f"A: {a}. B: {b}." + (f" Allowed difference: {_join_names(list(intended), 5)}." if intended else "")


def build_cells(name: str, line: PairResult) -> tuple[str, ...]:
    """Return the table cells of a pair, in the columns of HEAD."""
    before, after = (one.row["peak_allocated_bytes"] if one else None for one in (line.a, line.b))
    seconds = [one.row["sample_s"] if one else None for one in (line.a, line.b)]
    held = f": {words}" if (words := _GATE_WORDS.get(line.held or "")) else ""
    return (
        name,
        line.status + held,
        *(MISSING if time is None else format_significant(time) for time in seconds),
        format_time_change(line),
        describe_ground(line),
        f"{100 * (after / before - 1):+z.1f} %" if before and after and line.comparison else MISSING,
        "; ".join(list_remarks(line)) or MISSING,
    )


def format_time_change(line: PairResult) -> str:
    """Return the relative change of the time per sample from A to B. Its interval is included if there are enough runs
    for a verdict."""
    found = line.comparison
    if found is None:
        return MISSING
    if found.interval is None or not found.decides:
        return f"{format_ratio_change(found.ratio)}, indicative"
    return format_ratio_change(found.ratio, found.interval.low, found.interval.high)


def describe_ground(line: PairResult) -> str:
    """Describe the data behind a comparison: the number of runs on each side. If there are too few runs for a verdict,
    the text says that the steps of these runs were compared."""
    if line.comparison is None or line.runs is None:
        return MISSING
    return f"{'' if line.comparison.decides else 'steps of '}{line.runs[0]} + {line.runs[1]} runs"


def list_remarks(line: PairResult) -> list[str]:
    """Return the remarks on a pair: why it was not compared, why the regression gate is broken or undecided, changed
    quantities, and flags."""
    # A dict, unlike a set, keeps the order of the flags in the table.
    flags = dict.fromkeys(flag for one in (line.a, line.b) if one for flag in one.row["flags"].split())
    missing = (f"{side}: {one.row['reason']}" for side, one in (("A", line.a), ("B", line.b)) if one and one.row["n"])
    texts = [
        line.why,
        *(text for text in missing if text[3:]),
        *(f"{_GATE_WORDS[line.held or '']}: {doubt}" for doubt in line.gate_reasons),
        *map(format_quantity_change, line.changes),
    ]
    return [part for part in (*texts, "flags: " * bool(flags) + " ".join(flags)) if part]


def format_quantity_change(change: QuantityChange) -> str:
    """Return the name of a quantity and its values in A and in B, with enough digits to distinguish the two."""
    write = format_size if change.name.endswith("_bytes") else format_significant
    a, b = (_format_range(*map(write, side)) for side in (change.a, change.b))
    # If the rounded sizes look equal, the exact numbers show the difference.
    if a == b:
        a, b = (_format_range(*map("{:,}".format, side)) for side in (change.a, change.b))
    return f"{change.name} {a} → {b}"


def describe_intervals(compared: SetComparison) -> str:
    """Return sentences about the confidence level of the intervals, and about pairs with too few runs for a verdict."""
    gate, parts = compared.question.gate, ["Time change: change of the mean time per sample from A to B."]
    found = [line.comparison for _, line in compared.lines if line.comparison]
    if any(one.decides for one in found):
        parts.append(f"In parentheses: {format_share(gate.level if gate else LEVEL)} interval.")
    if gate and gate.looks > 1:
        parts.append(
            f"Results are judged up to {gate.looks} times while runs are added. The probability that any judgement is "
            f"wrong is at most {format_share(1 - LEVEL)}."
        )
    if not all(one.decides for one in found):
        gated = ", and the gate is inconclusive" if gate else ""
        parts.append(f"With fewer than {LEAST_RUNS} runs of A or B, a change is only indicative{gated}.")
    return " ".join(parts)


def _describe_gate(compared: SetComparison) -> str:
    gate = compared.question.gate
    if gate is None:
        return ""
    parts = [format_share(gate.limit) if gate.limit is not None else "", "exact" if gate.exact else ""]
    what = f"{compared.verdict}: the gate ({', '.join(part for part in parts if part)}) is "
    left = f" {excluded}" if (excluded := _describe_excluded(compared)) else ""
    count = format_count(len(compared.lines), "configuration")
    breaking = compared.breaking()
    if breaking:
        return f"{what}broken by {len(breaking)} of {count}: {_join_names(breaking, 3)}.{left}"
    if compared.verdict == "FAIL":
        why = f": they differ in {compared.note}" if compared.note else ""
        return f"{what}broken, because A and B share no configuration{why}.{left}"
    opened = [line for _, line in compared.lines if line.held == "open"]
    if not opened:
        return f"{what}kept by all compared configurations.{left}"
    reasons = next((line.gate_reasons for line in opened if line.gate_reasons), ())
    first = f": {', '.join(reasons)}" if reasons else ""
    return f"{what}undecided for {len(opened)} of {count}{first}.{left}"


def _describe_excluded(compared: SetComparison) -> str:
    """Return sentences on what the verdict ignores: the number of ignored configurations, by reason, and the repeats
    that were ignored."""
    lines = [line for _, line in compared.lines]
    named = [(side, one) for line in lines for side, one in (("A", line.a), ("B", line.b)) if one]

    def count_lines(rule: Callable[[Row], bool]) -> int:
        return sum(any(rule(one.row) for one in (line.a, line.b) if one) for line in lines)

    counts = {
        "out of memory": count_lines(lambda row: "oom" in str(row["outcome"])),
        "with another failure": count_lines(lambda row: not row["n"] and "oom" not in str(row["outcome"])),
        "with busy runs only": count_lines(lambda row: row["step_s"] is None and is_disturbed(row)),
        "only in A or only in B": sum(line.status in ("only in A", "only in B") for line in lines),
    }
    reasons = [f"{side}: {one.row['reason']}" for side, one in named if one.row["n"]]
    texts = {
        "configurations": [f"{count} {what}" for what, count in counts.items() if count],
        "repeats": [text for text in reasons if text[3:]],
    }
    return " ".join(f"Excluded {what}: {', '.join(parts)}." for what, parts in texts.items() if parts)


def _join_names(names: Sequence[str], most: int) -> str:
    return "; ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _format_range(low: str, high: str) -> str:
    return low if low == high else f"{low}–{high}"
