"""Wording of the results of a comparison, shared by all output formats for human readers."""

from collections import Counter
from collections.abc import Sequence
from typing import get_args

from analysis.compare import SetComparison
from analysis.compare.fields import name_across
from analysis.compare.judging import PairResult, QuantityChange, Status, format_share
from analysis.formats import MISSING, format_ratio_change, format_significant, format_size
from analysis.stats.compare import LEAST_RUNS
from analysis.summary import is_disturbed
from bench.core.statistics import LEVEL

# Table columns; SHORT has those that fit a terminal of 100 columns.
HEAD = ("configuration", "B is", "A, s per sample", "B, s per sample", "time of B", "rests on", "peak of B", "and")
SHORT = ("configuration", "B is", "time of B", "and")
RIGHT = ("A, s per sample", "B, s per sample")


def format_headline(compared: SetComparison) -> str:
    """Return a summary of one or two lines: the verdict of the gate, then the number of configurations by status."""
    counts = Counter(line.status for _, line in compared.lines)
    texts = ", ".join(f"{counts[status]} {status}" for status in get_args(Status) if counts[status])
    parts = [_describe_gate(compared), f"{texts or 'nothing to compare'}."]
    if differ := [one for _, line in compared.lines if line.status == "not comparable" for one in line.differ]:
        across = [*(part.name for part in compared.question.across), name_across(differ)]
        parts.append(f"To compare these as well: --across {','.join(across)}.")
    return " ".join(part for part in parts if part)


def describe_sides(compared: SetComparison) -> str:
    """Return a sentence with the names of A and B, and the differences that `--across` allows."""
    a, b = compared.question.called
    intended = dict.fromkeys(str(one) for _, line in compared.lines for one in line.intended)
    return f"A: {a}. B: {b}." + (f" Compared on purpose: {_join_names(list(intended), 5)}." if intended else "")


def build_cells(name: str, line: PairResult) -> tuple[str, ...]:
    """Return the table cells of a pair, in the columns of HEAD."""
    before, after = (one.row["peak_allocated_bytes"] if one else None for one in (line.a, line.b))
    held = {"broken": ": breaks the gate", "open": ": inconclusive"}.get(line.held or "", "")
    return (
        name,
        line.status + held,
        _format_time(line, "a"),
        _format_time(line, "b"),
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
    return f"{'' if line.comparison.decides else 'the steps of '}{line.runs[0]} + {line.runs[1]} runs"


def list_remarks(line: PairResult) -> list[str]:
    """Return the remarks on a pair: why it was not compared, why the gate is open or broken, changed quantities, and
    flags."""
    # A dict, unlike a set, keeps the order of the flags in the table.
    flags = dict.fromkeys(flag for one in (line.a, line.b) if one for flag in one.row["flags"].split())
    missing = (f"{side}: {one.row['reason']}" for side, one in (("A", line.a), ("B", line.b)) if one and one.row["n"])
    texts = [
        line.why,
        *(text for text in missing if text[3:]),
        *(f"{line.held}: {doubt}" for doubt in line.gate_reasons),
        *map(format_quantity_change, line.changes),
    ]
    return [part for part in (*texts, " ".join(flags)) if part]


def format_quantity_change(change: QuantityChange) -> str:
    """Return the name of a quantity and its values in A and in B, with enough digits to distinguish the two."""
    write = format_size if change.name.endswith("_bytes") else format_significant
    a, b = (_format_range(*map(write, side)) for side in (change.a, change.b))
    # If the rounded sizes look equal, the exact numbers show the difference.
    if a == b:
        a, b = (_format_range(*map("{:,}".format, side)) for side in (change.a, change.b))
    return f"{change.name} {a} → {b}"


def describe_intervals(compared: SetComparison) -> str:
    """Return sentences about the level of the intervals, and about pairs with too few runs for a verdict."""
    gate, parts = compared.question.gate, ["Change of the time per sample of B against A, over the whole window."]
    found = [line.comparison for _, line in compared.lines if line.comparison]
    if any(one.decides for one in found):
        parts.append(f"In parentheses: its {format_share(gate.level if gate else LEVEL)} interval.")
    if gate and gate.looks > 1:
        parts.append(f"Judged up to {gate.looks} times, which together err in at most {format_share(1 - LEVEL)}.")
    if not all(one.decides for one in found):
        parts.append(
            f"With fewer than {LEAST_RUNS} runs per side a change is indicative only, and a gate is inconclusive."
        )
    return " ".join(parts)


def _describe_gate(compared: SetComparison) -> str:
    gate = compared.question.gate
    if gate is None:
        return ""
    parts = [format_share(gate.limit) if gate.limit is not None else "", "exact" if gate.exact else ""]
    what = f"{compared.verdict}: gate ({', '.join(part for part in parts if part)}) "
    left = f" {excluded}" if (excluded := _describe_excluded(compared)) else ""
    breaking = compared.breaking()
    if breaking:
        return f"{what}broken by {len(breaking)} of {len(compared.lines)}: {_join_names(breaking, 3)}.{left}"
    if compared.verdict == "FAIL":
        why = f", since they differ in {compared.note}" if compared.note else ""
        return f"{what}broken: A and B share no configuration{why}.{left}"
    opened = [line for _, line in compared.lines if line.held == "open"]
    if not opened:
        return f"{what}kept.{left}"
    reasons = next((line.gate_reasons for line in opened if line.gate_reasons), ())
    first = f": {', '.join(reasons)}" if reasons else ""
    return f"{what}open for {len(opened)} of {len(compared.lines)}{first}.{left}"


def _describe_excluded(compared: SetComparison) -> str:
    """Return a sentence that counts configurations which did not take part in the verdict, and excluded repeats."""
    named = [(side, one) for _, line in compared.lines for side, one in (("A", line.a), ("B", line.b)) if one]
    sides = [one for _, one in named]
    counts = Counter(
        {
            "out of memory": sum("oom" in str(one.row["outcome"]) for one in sides),
            "failed otherwise": sum(not one.row["n"] and "oom" not in str(one.row["outcome"]) for one in sides),
            "with busy runs only": sum(one.row["step_s"] is None and is_disturbed(one.row) for one in sides),
            "without a partner": sum(line.status in ("only in A", "only in B") for _, line in compared.lines),
        }
    )
    reasons = [f"{side}: {one.row['reason']}" for side, one in named if one.row["n"]]
    texts = [*(f"{count} {what}" for what, count in counts.items() if count), *(text for text in reasons if text[3:])]
    return f"Left out: {', '.join(texts)}." if texts else ""


def _join_names(names: Sequence[str], most: int) -> str:
    return "; ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _format_range(low: str, high: str) -> str:
    return low if low == high else f"{low}–{high}"


def _format_time(line: PairResult, side: str) -> str:
    one = getattr(line, side)
    seconds = one.row["sample_s"] if one else None
    return MISSING if seconds is None else format_significant(seconds)
